# Builds and installs a library of this folder: shared, static, its headers, a pkg-config file and a CMake package. Of its Makefile:
#   NAME (burst: libburst), VERSION, SOURCES, HEADERS (what users include), DESCRIPTION
# make install [PREFIX=/usr/local] [LIBDIR=$PREFIX/lib] [DESTDIR=…] [CC=clang] [CFLAGS=…]
PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
BUILD ?= ../../build/lib$(NAME)
CFLAGS ?= -O2 -g
SONAME := lib$(NAME).so.0
MAP := lib$(NAME).map

PARTS := $(wildcard *.h ../fmq/*.h ../burst/*.h ../libburst/*.h)
OBJECTS := $(patsubst %.c,$(BUILD)/%.o,$(notdir $(SOURCES)))
VPATH := $(sort $(dir $(SOURCES)))
COMPILE := $(CC) -std=c11 -fPIC -Wall -Wextra -Wpedantic -I.. $(CPPFLAGS) $(CFLAGS)
CMAKE := cmake/$(NAME)
INSTALLED = $(addprefix $(DESTDIR)$(PREFIX)/include/,$(notdir $(HEADERS))) $(addprefix $(DESTDIR)$(LIBDIR)/,$(SONAME) lib$(NAME).so \
	lib$(NAME).a pkgconfig/lib$(NAME).pc $(CMAKE)/$(NAME)-config.cmake $(CMAKE)/$(NAME)-config-version.cmake)
FILL := sed 's|@NAME@|$(NAME)|g; s|@PREFIX@|$(PREFIX)|g; s|@LIBDIR@|$(LIBDIR)|; s|@VERSION@|$(VERSION)|; s|@DESCRIPTION@|$(DESCRIPTION)|'

.PHONY: all install uninstall abi
all: $(BUILD)/$(SONAME) $(BUILD)/lib$(NAME).a

$(BUILD)/%.o: %.c $(PARTS) | $(BUILD)
	$(COMPILE) -c $< -o $@

$(BUILD):
	mkdir -p $@

$(BUILD)/$(SONAME): $(OBJECTS) $(MAP)
	$(CC) $(CFLAGS) $(LDFLAGS) -shared -Wl,-soname,$(SONAME) -Wl,--version-script,$(MAP) -Wl,-z,defs $(OBJECTS) -pthread -o $@

# One object whose other names are hidden: a program may have functions of its own called as ours, and both libraries.
$(BUILD)/lib$(NAME).a: $(OBJECTS) $(MAP)
	$(LD) -r $(OBJECTS) -o $(BUILD)/whole.o
	grep -o '[a-z_]*;' $(MAP) | tr -d ';' >$(BUILD)/exported
	objcopy --keep-global-symbols=$(BUILD)/exported $(BUILD)/whole.o
	rm -f $@ && $(AR) rcs $@ $(BUILD)/whole.o

# Prints a line for each file, and no commands.
install: all
	@install -d $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(LIBDIR)/pkgconfig $(DESTDIR)$(LIBDIR)/$(CMAKE)
	@install -m 644 $(HEADERS) $(DESTDIR)$(PREFIX)/include
	@install -m 755 $(BUILD)/$(SONAME) $(DESTDIR)$(LIBDIR)
	@ln -sf $(SONAME) $(DESTDIR)$(LIBDIR)/lib$(NAME).so
	@install -m 644 $(BUILD)/lib$(NAME).a $(DESTDIR)$(LIBDIR)
	@$(FILL) ../library.pc.in >$(DESTDIR)$(LIBDIR)/pkgconfig/lib$(NAME).pc
	@$(FILL) ../library-config.cmake.in >$(DESTDIR)$(LIBDIR)/$(CMAKE)/$(NAME)-config.cmake
	@$(FILL) ../library-config-version.cmake.in >$(DESTDIR)$(LIBDIR)/$(CMAKE)/$(NAME)-config-version.cmake
	@printf 'installed %s\n' $(INSTALLED)

uninstall:
	rm -f $(INSTALLED)
	rm -rf $(DESTDIR)$(LIBDIR)/$(CMAKE)

abi: $(BUILD)/$(SONAME)
	abidw --exported-interfaces-only --type-id-style hash --no-corpus-path --no-comp-dir-path --no-show-locs $< >lib$(NAME).abi
