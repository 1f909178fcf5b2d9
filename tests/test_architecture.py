"""The contracts between the parts, as tests: layout, sizes, one arrow, nothing generated, nothing undocumented."""

import ast
import inspect
import re
import struct
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.sources

ROOT = Path(__file__).parents[1]
PACKAGES = ("fmq", "burst", "driver")
TOP = {
    *(".ci", ".clang-format", ".github", ".gitignore", "LICENSE", "Makefile", "README.md", "pyproject.toml"),
    *("CHANGELOG.md", "CITATION.cff", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md"),
    *(".dockerignore", "Containerfile", "compose.yaml", "llms.txt"),
    *("bench", "burst", "burst_engine", "csrc", "docs", "driver", "examples", "fmq", "packaging", "tests"),
}
MOST_LINES_OF_A_FUNCTION, MOST_LINES_OF_A_FILE = 60, 600
TOO_LONG: dict[str, str] = {}  # "path" or "path:function" -> why it may be longer; starts empty and should stay so


@cache
def parsed(path):
    """A file's code as a tree: many of these tests look at all files."""
    return ast.parse(path.read_text())


@pytest.fixture(scope="module", autouse=True)
def trees():
    """Are forgotten after the last of these tests, so that whoever collects garbage later need not look at them."""
    yield
    parsed.cache_clear()


def tracked(*patterns):
    """Files that git knows, or would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if out.returncode:
        pytest.skip("not a git checkout")
    return [path for path in map(ROOT.joinpath, out.stdout.splitlines()) if path.is_file()]


def name(path):
    return str(path.relative_to(ROOT))


def sources(*suffixes):
    return [
        path for folder in (*PACKAGES, "csrc") for path in sorted((ROOT / folder).rglob("*")) if path.suffix in suffixes
    ]


def python_functions(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.end_lineno - node.lineno + 1


def c_functions(path):
    """A definition begins in column 0, perhaps over two lines, and ends with a brace there, or on its own line."""
    text = path.read_text()
    for head in re.finditer(r"^[a-z_][\w\s*]*?\b(\w+)\([^;{}]*?\) \{", text, re.MULTILINE):
        line_end = text.index("\n", head.end())
        end = line_end if text[line_end - 1] == "}" else text.index("\n}", head.end()) + 2
        yield head[1], text.count("\n", head.start(), end) + 1


# ---- layout --------------------------------------------------------------------------------------------------------


def test_nothing_unexpected_stands_at_the_top():
    """A new name at the top of the repository is a decision, made here."""
    assert {name(path).split("/")[0] for path in tracked()} <= TOP


def test_there_are_three_import_packages():
    """fmq, burst and driver are what a wheel holds, and burst_engine, which says what stands in their place."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert config["tool"]["scikit-build"]["wheel"]["packages"] == ["burst_engine", *PACKAGES]
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders == {"burst_engine", *PACKAGES}


def test_imports_point_left():
    """fmq <- burst <- driver: nothing imports what stands to its right (import-linter holds the finer contracts)."""
    for left, right in [("fmq", {"burst", "driver"}), ("burst", {"driver"})]:
        for path in sorted((ROOT / left).rglob("*.py")):
            assert not imports(path) & right, name(path)


def modules_imported(path, package):
    """Modules of a package that a file imports anywhere in it: for type checkers and inside functions, too."""
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if name.startswith(f"{package}.")}


@pytest.mark.parametrize("package", ["fmq", "burst"])
def test_there_are_no_circles_of_modules(package):
    """Each module can stand after those that it imports."""
    files = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / package).rglob("*.py")}
    modules = set(files.values())
    graph = {module: modules_imported(path, package) & modules for path, module in files.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def imports(path):
    """The top-level packages that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def names_of_packages(path):
    """What a file takes from fmq, burst and driver: (module, name), by `from`, by `import` or by an attribute."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {(alias.name, None) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add((node.value.id, node.attr))
    return {(module, taken) for module, taken in found if module.split(".")[0] in PACKAGES}


def test_demos_use_nothing_that_users_could_not():
    """Of the packages only what their __all__ names, beside other files of the demos: they are to be copied."""
    public = {(package, taken) for package in PACKAGES for taken in [None, *import_module(package).__all__]}
    for path in sorted((ROOT / "driver/demos").glob("*.py")):
        own = {(module, taken) for module, taken in names_of_packages(path) if module.startswith("driver.demos")}
        assert names_of_packages(path) - own <= public, name(path)


def test_only_the_command_knows_the_demos():
    """Nothing else imports them, nor the libraries that only they need."""
    for path in sources(".py"):
        if not {"demos", "cli"} & {folder.name for folder in path.parents}:
            assert "driver.demos" not in path.read_text(), name(path)
            assert not imports(path) & {"av", "matplotlib"}, name(path)


def test_the_live_page_needs_no_matplotlib():
    """The extra `web` does without it: a newcomer waits for what is installed."""
    shown = "import driver.cli.live_model, driver.demos.web.audio, driver.demos.web.camera, driver.demos.web.server"
    code = f"import sys; sys.modules['matplotlib'] = None; {shown}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_imports_the_demos_only_when_they_run():
    """No file of the command imports them at its top level, but the one that shows a model on the live page: neither
    the page nor the drawing slows it down.
    """
    for path in sorted({*(ROOT / "driver/cli").glob("*.py")} - {ROOT / "driver/cli/live_model.py"}):
        at_the_top = ast.Module([node for node in parsed(path).body if not isinstance(node, ast.If)], [])
        functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        at_the_top.body = [node for node in at_the_top.body if not isinstance(node, functions)]
        assert "driver.demos" not in ast.unparse(at_the_top), name(path)


@pytest.mark.parametrize("demo", ["camera", "audio"])
def test_a_demo_is_short(demo):
    """A program to begin with has 150 lines at most."""
    assert len((ROOT / f"driver/demos/{demo}.py").read_text().splitlines()) <= 150


def test_every_folder_says_what_it_is_for():
    """A package by its docstring, csrc by its README."""
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")):
        if path.stat().st_size:
            assert ast.get_docstring(parsed(path)), name(path)
    assert (ROOT / "csrc/README.md").read_text().startswith("# ")


def test_init_files_only_re_export():
    """A docstring, imports and __all__: whoever looks for code finds it in a file that is named after it.

    The lists of devices and of operation families are lists by design, and stand where both are looked for.
    """
    inits = {path for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")}
    for path in sorted(inits - {ROOT / "driver/devices/__init__.py", ROOT / "driver/nn/ops/__init__.py"}):
        for node in parsed(path).body:
            is_all = isinstance(node, ast.Assign | ast.AnnAssign) and "__all__" in ast.unparse(node).split("=")[0]
            is_doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_late = isinstance(node, ast.Assign) and ast.unparse(node).startswith(
                "__getattr__, __dir__ = late_names("
            )
            within = node.body if isinstance(node, ast.If) else [node]
            is_import = all(isinstance(each, ast.Import | ast.ImportFrom) for each in within)
            assert is_all or is_doc or is_late or is_import, f"{name(path)}:{node.lineno}"


def late(path):
    """The names that a package imports when they are asked for, by module; and those that a type checker is told."""
    asked, told = {}, {}
    for node in parsed(path).body:
        if isinstance(node, ast.Assign) and "late_names" in ast.unparse(node.value):
            table = ast.literal_eval(node.value.args[1])
            asked = {(module, each) for module, names in table.items() for each in names.split()}
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            package = ".".join(path.parent.relative_to(ROOT).parts)
            told = {
                (f"{package}.{part.module}" if part.level else part.module, each.name)
                for part in node.body
                for each in part.names
            }
    return asked, told


def test_a_package_with_late_names_is_reloaded():
    """As notebooks do it: its names are there afterwards, those of its folders too."""
    code = "import importlib, driver; importlib.reload(driver); print(callable(driver.devices), callable(driver.load))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True True\n"
    )


def test_type_checkers_know_what_is_imported_late():
    """The names that a package imports when they are asked for are those that it imports for type checkers."""
    inits = [path for path in sources(".py") if path.name == "__init__.py" and "late_names(" in path.read_text()]
    assert ROOT / "driver/__init__.py" in inits
    for path in inits:
        asked, told = late(path)
        assert asked == told, name(path)


def test_every_name_of_the_surface_is_there():
    """What __all__ names can be imported, and `dir` shows it."""
    for package in [*PACKAGES, "driver.nn", "driver.importers", "driver.devices.onnxruntime", "driver.devices.litert"]:
        module = import_module(package)
        assert {each for each in module.__all__ if not hasattr(module, each)} == set(), package
        assert set(module.__all__) <= set(dir(module)), package


def test_driver_is_imported_without_what_it_starts():
    """`import driver` loads numpy and the rules of models; no queue, client, device or event loop, and no more modules
    of the standard library than a program has that imports numpy, but for a few.
    """
    code = "import sys, numpy; before = set(sys.modules); import driver; print(*sorted(set(sys.modules) - before))"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    ours = {each for each in found if each.split(".")[0] in {*PACKAGES, "burst_engine"}}
    models = {f"driver.nn.{path.stem}" for path in (ROOT / "driver/nn").glob("*.py")} - {"driver.nn.interpreter"}
    start = {"driver", "driver.foundations", "driver.late_names", "driver.errors", "driver.plugins", "driver.devices"}
    assert {each for each in ours if not each.startswith("burst_engine")} <= {*start, "driver.nn", *models}
    heavy = {"asyncio", "ssl", "socket", "subprocess", "concurrent", "logging", "json", "email", "cffi", "msgpack"}
    assert {each.split(".")[0] for each in found} & heavy == set()


def test_a_drop_in_is_imported_without_the_rest():
    """A program waits for the way to a device, and not for what compiles models or for the table of operations."""
    pytest.importorskip("onnxruntime")
    code = "import sys, driver.dropin.onnxruntime; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(found.stdout.split())
    for absent in ("driver.runtime", "driver.engine", "driver.recording", "driver.nn.ops", "driver.nn.interpreter"):
        assert absent not in loaded, absent
    assert {"asyncio", "ssl", "email", "importlib.metadata", "tomllib", "shutil"} & loaded == set()


@pytest.mark.parametrize("word", ["utils", "common", "core", "helpers", "misc"])
def test_no_module_is_a_drawer(word):
    """A module is named after its subject."""
    assert [name(path) for path in sources(".py", ".c", ".h") if path.stem == word] == []


def test_public_classes_say_what_their_methods_do():
    """Every public method of an exported class has a docstring, its own or that of the method that it overrides."""
    for package in PACKAGES:
        module = import_module(package)
        kinds = [kind for kind in (getattr(module, each) for each in module.__all__) if inspect.isclass(kind)]
        for kind in kinds:
            for method, member in vars(kind).items():
                if not method.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                    assert inspect.getdoc(getattr(kind, method)), f"{package}.{kind.__name__}.{method}"


# ---- size ----------------------------------------------------------------------------------------------------------


def test_no_file_is_long():
    """Six hundred lines at most; the aim is 250. A long file is better than a class sawn into a ladder."""
    lengths = {name(path): len(path.read_text().splitlines()) for path in sources(".py", ".c", ".h")}
    assert [where for where, lines in lengths.items() if lines > MOST_LINES_OF_A_FILE and where not in TOO_LONG] == []


def test_no_function_is_long():
    """Sixty lines at most, in Python and in C."""
    lengths = {}
    for path in sources(".py", ".c"):
        for function, lines in (python_functions if path.suffix == ".py" else c_functions)(path):
            lengths[f"{name(path)}:{function}"] = lines
    assert [
        where for where, lines in lengths.items() if lines > MOST_LINES_OF_A_FUNCTION and where not in TOO_LONG
    ] == []


def test_the_measure_of_c_functions_sees_them_all():
    """The check above is worth nothing if its pattern misses definitions."""
    found = {function for path in sources(".c") for function, _ in c_functions(path)}
    assert set(exported()) <= found


# ---- the C interface -----------------------------------------------------------------------------------------------


def exported():
    """The functions that an api.h declares."""
    texts = [without_comments(ROOT / f"csrc/{package}/api.h") for package in ("fmq", "burst")]
    return [
        name for text in texts for name in re.findall(r"^(?!typedef).*?\b((?:fmq|burst)_\w+)\(", text, re.MULTILINE)
    ]


def without_comments(path):
    return re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)


def test_the_arrow_holds_in_c():
    """No file of csrc/fmq includes, calls or names anything of csrc/burst."""
    for path in sorted((ROOT / "csrc/fmq").glob("*.[ch]")):
        assert not re.search(r"\bburst", without_comments(path), re.IGNORECASE), name(path)


def test_every_exported_function_is_documented():
    """Each declaration has a comment on its line or stands in a paragraph that begins with one."""
    paragraphs = "\n\n".join((ROOT / f"csrc/{package}/api.h").read_text() for package in ("fmq", "burst")).split("\n\n")
    for function in exported():
        home = next(text for text in paragraphs if re.search(rf"\b{function}\(", text))
        assert "/*" in home, function


def test_every_exported_function_is_used():
    """From Python, or from a C test or bench: an export that nobody calls is not tested either."""
    python = [path.read_text() for path in sources(".py")] + [
        path.read_text() for path in (ROOT / "tests").rglob("*.py")
    ]
    c = [path.read_text() for folder in ("tests", "bench") for path in (ROOT / folder).rglob("*.c")]
    words = set(re.findall(r"\w+", "\n".join(python + c)))
    assert [function for function in exported() if function not in words] == []


def test_only_the_seam_makes_futex_calls():
    """csrc/fmq/futex.c is what tests replace, and no other file goes past it."""
    callers = {path.name for path in sources(".c") if re.search(r"syscall\(SYS_futex", path.read_text())}
    assert callers == {"futex.c"}


def test_c_headers_say_what_they_are():
    """Each C file begins with a comment, after the feature macro at most."""
    for path in sources(".c", ".h"):
        head = path.read_text().removeprefix("#define _GNU_SOURCE\n")
        assert head.startswith("/*") or f'#include "{path.parent.name}/{path.stem}.h"' in head.splitlines()[0], name(
            path
        )


# ---- names --------------------------------------------------------------------------------------------------------

NAMES_OF_SEVERAL_CLASSES = {
    # What users catch: each package's own, for the same misfortune.
    *("Busy", "OutputInsufficientSize", "PeerDied", "Timeout"),
}


def test_a_class_name_is_given_once():
    """A reader who sees the name of a class knows which one it is, in all three packages."""
    places = {}
    for path in sources(".py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{name(path)}:{node.lineno}")
    assert {kind: found for kind, found in places.items() if len(found) > 1}.keys() <= NAMES_OF_SEVERAL_CLASSES


# ---- calls ---------------------------------------------------------------------------------------------------------

MOST_TERMS = 4  # by position
OF_OTHERS = {
    "burst/burst_executor.py:execute",  # a driver's executor, which may call its arguments as it likes
    "driver/devices/onnxruntime/on_cuda.py:bind",  # a method of ONNX Runtime's
}


def takes_all(node):
    """True if a function or a class takes any number of terms."""
    if isinstance(node, ast.ClassDef):
        inner = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
        return any(takes_all(part) for part in inner)
    return node.args.vararg is not None


def own_callees():
    """The names of functions and classes of the product, which say what they take."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    nodes = [node for path in sources(".py") for node in ast.walk(parsed(path)) if isinstance(node, kinds)]
    foreign = {*dir(np.ndarray), *dir(np), *dir(str), *dir(list), *dir(dict), *dir(struct.Struct)}
    return {node.name for node in nodes} - {node.name for node in nodes if takes_all(node)} - foreign


def taken_from_others(path):
    """What a file imports from elsewhere than the product."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] not in PACKAGES)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] not in PACKAGES:
            yield from (alias.asname or alias.name for alias in node.names)


def long_calls(path, callees):
    """Calls with more than `MOST_TERMS` terms by position, as (name of what is called, line)."""
    foreign = set(taken_from_others(path))
    callees = callees - foreign | {"cls"}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call) and len(node.args) > MOST_TERMS:
            function = node.func
            owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
            called = getattr(function, "attr", getattr(function, "id", ""))
            if called in callees and owner not in foreign and not owner.endswith(("lib", "ffi")):
                yield called, node.lineno


def test_no_call_has_many_terms_by_position():
    """What is ours is called with four terms by position at most: a reader need not count commas."""
    callees = own_callees()
    found = [
        f"{name(path)}:{line} {called}"
        for path in sources(".py")
        for called, line in long_calls(path, callees)
        if f"{name(path)}:{called}" not in OF_OTHERS
    ]
    assert found == []


# ---- contracts ------------------------------------------------------------------------------------------------------

ASKED_OF_OTHERS = {  # constant names that these files may ask an object for: it is no device's
    "burst/errors.py": {"names", "tolist"},  # what a user gave as an array
    "driver/devices/cuda/gpu_pool.py": {"__dlpack_device__"},
    "driver/devices/cuda/gpu_tensor.py": {"__dlpack__", "__dlpack_device__"},
    "driver/devices/cuda/lane.py": {"from"},  # a field in C whose name is a keyword in Python
    "driver/engine/cache/blobs.py": {"sqlite_errorcode"},
    "driver/engine/sandbox.py": {"__path__"},  # a module's
}


def asked_for(path):
    """The names that a file looks for with `getattr` or `hasattr`, where it states them; with their lines."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"getattr", "hasattr"}:
            if isinstance(node.args[1], ast.Constant):
                yield node.args[1].value, node.lineno
            elif node.func.id == "hasattr":
                yield ast.unparse(node.args[1]), node.lineno


def test_nothing_of_a_device_is_looked_for():
    """What a device or an execution can do is declared in a base class, with a default. One file takes objects that do
    not inherit.
    """
    folders = [ROOT / folder for folder in ("burst", "driver/engine", "driver/runtime", "driver/devices")]
    files = {path for folder in folders for path in folder.rglob("*.py")} - {ROOT / "burst/adapted.py"}
    found = [
        f"{name(path)}:{line} {asked}"
        for path in sorted(files)
        for asked, line in asked_for(path)
        if asked not in ASKED_OF_OTHERS.get(name(path), set())
    ]
    assert found == []


# ---- hygiene -------------------------------------------------------------------------------------------------------


def test_nothing_generated_is_committed():
    """What a tool writes is written again by whoever needs it."""
    generated = re.compile(r"(\.(so|o|a|pyc|egg-info|whl)|(^|/)(_core\.c|build|dist|__pycache__|\.venv))(/|$)")
    assert [name(path) for path in tracked() if generated.search(name(path))] == []


def test_nothing_names_a_machine():
    """No absolute path of somebody's home or working folder, and no note to be removed later."""
    paths = re.compile(r"/(home|root|Users|work|mnt)/\w")
    note = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    for path in tracked("*.py", "*.c", "*.h", "*.md", "*.toml", "Makefile", "*.txt", "*.yml"):
        text = path.read_text()
        assert not note.search(text), name(path)
        if path != Path(__file__):
            assert not paths.search(text), f"{name(path)}: {paths.search(text)}"


def test_every_test_says_what_it_claims():
    """The docstring of a test is its claim."""
    for path in tracked("tests/**.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert ast.get_docstring(node), f"{name(path)}:{node.lineno} {node.name}"


def test_docstrings_are_sentences():
    """A function does something, a class is something; no docstring begins as the second half of a sentence.

    Files that pyproject.toml exempts from ruff's D401 are exempt here, too, but for the kit's: its tests state claims.
    """
    fragment = re.compile(r"(As|Of|Whether|What|The same)\b")
    ignores = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["per-file-ignores"]
    exempt = [pattern for pattern, rules in ignores.items() if "D401" in rules and pattern != "driver/vts/**"]
    found = []
    for path in tracked("*.py"):
        if not any(fnmatch(name(path), pattern) for pattern in exempt):
            found += [
                f"{name(path)}:{node.lineno} {node.name}: {docstring:.60}"
                for node in ast.walk(parsed(path))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                and fragment.match(docstring := ast.get_docstring(node) or "")
            ]
    assert not found


WHOLE = (
    *("fmq/", "burst/", "driver/nn/", "driver/protocol/", "driver/service/"),
    *("driver/client/", "driver/engine/", "driver/runtime/", "driver/devices/", "driver/importers/", "driver/formats/"),
    *("driver/gateways/", "driver/cli/", "driver/demos/", "driver/doctor/", "driver/monitor/", "driver/recording/"),
    "driver/replicas/",
)
"""Folders whose functions say in each docstring what they do."""
NO_VERB = re.compile(
    r"(None|Under|Seconds|Nothing|For|With|Without|By|In|On|At|Until|From|Before|After|While|When|Where|Who|Which|To|Only|"
    r"Not|No|All|Each|Every|But|And|Or|If|Also|Raises|Returns|Lets|Takes|Says|False|True|Too|Like|Beside|Across|How|Why|"
    r"Its|Their|This|That|Those|These|It|One|Some|Many|Both|Again|Once|Between|Within|Behind|Inside|The|A|An|"
    r"(?!(?:Process|Pass|Address|Cross|Discuss|Access|Express|Compress|Decompress|Guess|Press)\b)[A-Z][a-z]+s)\b"
)
NO_NOUN = re.compile(r"(None|Under|How|Why|Where|When|Who|Which|If|Return|Raises?)\b")

RAISES = re.compile(r"(^|[.;]\s+)Raises [`\w]")


def test_functions_say_what_they_do():
    """A docstring of a function begins with a verb, in the imperative; that of a property with a noun."""
    found = []
    for path in tracked("*.py"):
        for node in ast.walk(parsed(path)) if name(path).startswith(WHOLE) else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node) or ""
                is_property = any("property" in ast.unparse(each) for each in node.decorator_list)
                if (NO_NOUN if is_property else NO_VERB).match(docstring):
                    found.append(f"{name(path)}:{node.lineno} {node.name}: {docstring:.60}")
    assert found == []


def test_functions_raise_in_the_imperative():
    """A docstring of a function says what it raises as it says what it returns: "Return the answer. Raise Timeout."."""
    found = [
        f"{name(path)}:{node.lineno} {node.name}"
        for path in sources(".py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not any("property" in ast.unparse(each) for each in node.decorator_list)
        and RAISES.search(ast.get_docstring(node) or "")
    ]
    assert found == []


def test_no_test_sleeps():
    """A test waits for an event, not for a while (devices take their time, and `until` pauses between two looks)."""
    for path in tracked("tests/**.py", ":!tests/devices", ":!tests/waiting.py"):
        assert not re.search(r"\btime\.sle" + r"ep\(", path.read_text()), name(path)


# ---- private names -------------------------------------------------------------------------------------------------

PRIVATE_NAMES = 171  # an upper bound: it may only fall
OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}


def is_private(word):
    return word.startswith("_") and not word.startswith("__") and word not in OF_NAMED_TUPLES


def own_names(path):
    """What a file defines itself: functions, classes, and attributes of `self`."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}:
            yield node.attr


def names_reached_for(path):
    """Attributes of others, imports, and names that are patched."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls", "os", "sys"}):
                yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            words = [word.value for word in node.args[:2] if isinstance(word, ast.Constant)]
            yield from (word.rpartition(".")[2] for word in words if isinstance(word, str))


def test_tests_reach_for_few_private_names():
    """What tests need of the product has a name without an underscore, or stands once in a helper."""
    counts = {}
    for path in tracked("tests/**.py", ":!tests/devices"):
        own = set(own_names(path))
        counts[name(path)] = sum(is_private(word) and word not in own for word in names_reached_for(path))
    assert sum(counts.values()) <= PRIVATE_NAMES, sorted(counts.items(), key=lambda item: -item[1])[:10]
