# find_package(BurstDevice REQUIRED), with BurstDevice_DIR = what `python -m driver.devices.library --cmake` prints.
#
# Then: add_library(mydevice MODULE mydevice.c)
#       target_link_libraries(mydevice PRIVATE Burst::Device)
#
# Burst::Device brings the header, and compiles burst_device.c into the library.
if(NOT TARGET Burst::Device)
  add_library(burst_device STATIC "${CMAKE_CURRENT_LIST_DIR}/burst_device.c")
  add_library(Burst::Device ALIAS burst_device)
  target_include_directories(burst_device PUBLIC "${CMAKE_CURRENT_LIST_DIR}")
  set_target_properties(burst_device PROPERTIES
    C_STANDARD 11 C_STANDARD_REQUIRED ON C_VISIBILITY_PRESET hidden POSITION_INDEPENDENT_CODE ON)
endif()
set(BurstDevice_FOUND TRUE)
