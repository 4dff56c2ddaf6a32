"""Imports point down only, and light modules stay light: the architecture as a test."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ajaxckpt"
# layer: modules; a module may import from lower layers, and from the rows above it
# within its own
LAYERS = [
    ["_errors"],
    ["_grammar", "_names", "_patterns", "_dtypes", "_layout", "_decisions"],
    ["_scalars", "_plain", "_metadata", "_payload", "_digest", "_provenance"],
    ["_format", "_parsing"],
    ["_leaves", "_tree", "_places", "_device_arrays", "_placement"],
    ["_paths", "_files", "_directories"],
    ["_writer", "_leaf_file", "_reader", "_seed_leaves"],
    ["_templates", "_drafts", "_scopes", "_verbs", "_moves", "_axes"],
    ["_entries", "_rules", "_migrations", "_applying"],
    ["_opening", "_migrating", "_derived"],
    ["_differences", "_roles", "_notes", "_skeletons", "_checks"],
    ["_tables", "_progress", "_plan_table", "_suggestions", "_adoption"],
    ["_plan", "_collecting", "_checkpoint", "_copying"],
    ["_retention", "_schedule", "_overrides", "_resume_config", "_host_rng"],
    ["_measuring"],
    ["_signals", "_background", "_preflight", "_snapshot", "_background_saves"],
    ["_traced_saves", "_scan_programs"],
    ["_listing", "_run_files", "_metrics_rows", "_metrics_log"],
    ["_run_saving", "_run_restoring"],
    ["_run_locks", "_run_steps", "_run_sessions", "_runs"],
    ["_advances", "_equivalence", "_trials", "_fresh_process"],
    ["_resume_verdicts", "_resume_runs", "_sensitivity"],
    ["_normalisers", "_export_sources", "_export_json", "_exporting", "_policies"],
    ["_programs", "_exported_function"],
]
CLI = [
    *("_document", "_arguments", "_inspection", "_comparison"),
    *("_reports", "_run_reports", "_sessions", "_loading", "_plan_commands"),
    *("_run_commands", "_commands"),
]
JAX_MODULES = {
    *("_leaves", "_tree", "_places", "_device_arrays", "_placement", "_checkpoint"),
    *("_skeletons", "_adoption", "_run_restoring", "_run_steps", "_background_saves"),
    *("_traced_saves", "_scan_programs"),
    *("_trials", "_fresh_process", "_sensitivity"),
    *("_programs", "_exported_function", "_export_sources"),
}


def parse_runtime(source: str) -> ast.Module:
    """Parse a module without what it imports for typing's sake alone."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    return tree


def internal_imports(source: str) -> Iterator[str]:
    for node in ast.walk(parse_runtime(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module.startswith("ajaxckpt."):
                yield node.module.removeprefix("ajaxckpt.")


def runtime_imports(source: str) -> Iterator[str]:
    """Yield the top-level packages imported."""
    for node in ast.walk(parse_runtime(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def rank(module: str) -> tuple[int, int]:
    for level, modules in enumerate([*LAYERS, [*CLI, "_cli"]]):
        if module in modules:
            return level, modules.index(module)
    raise AssertionError(f"{module} stands in no layer")


def find_violations(sources: dict[str, str]) -> list[str]:
    found: list[str] = []
    for module, source in sources.items():
        for imported in internal_imports(source):
            if imported != module and rank(imported) >= rank(module):
                found.append(f"{module} imports {imported}")
        packages = set(runtime_imports(source))
        allowed = {"rich"} if module == "_progress" else set[str]()
        if packages & {"jax", "jaxlib"} and module not in JAX_MODULES:
            found.append(f"{module} imports jax")
        if packages & {"flax", "optax", "orbax", "chex", "rich"} - allowed:
            found.append(f"{module} imports a library of agents")
    return found


def read_sources() -> dict[str, str]:
    paths = (p for p in PACKAGE.glob("_*.py") if not p.stem.startswith("__"))
    return {path.stem: path.read_text() for path in paths}


def test_imports_point_down_only() -> None:
    sources = read_sources()
    assert set(sources) == {m for row in [*LAYERS, CLI, ["_cli"]] for m in row}
    assert find_violations(sources) == []


@pytest.mark.parametrize(
    ("module", "line", "violation"),
    [
        ("_names", "from ajaxckpt._files import Sink", "_names imports _files"),
        ("_format", "import jax", "_format imports jax"),
        ("_reader", "from jax import numpy", "_reader imports jax"),
        ("_plan", "import optax", "_plan imports a library of agents"),
        ("_tree", "from ajaxckpt._plan import make_plan", "_tree imports _plan"),
    ],
)
def test_a_planted_violation_is_found(module: str, line: str, violation: str) -> None:
    sources = read_sources()
    sources[module] += f"\n{line}\n"
    assert find_violations(sources) == [violation]


def test_only_the_command_line_prints() -> None:
    calls = {
        module
        for module, source in read_sources().items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    }
    assert calls <= {"_cli"}


def find_calls(source: str, names: set[str]) -> list[str]:
    calls = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call))
    return [ast.unparse(call) for call in calls if ast.unparse(call.func) in names]


def test_only_files_and_directories_change_the_disk() -> None:
    changing = {
        *("os.replace", "os.rename", "os.unlink", "os.mkdir", "os.fsync", "open"),
        *("os.write", "os.writev", "os.fchmod", "shutil.copy", "shutil.move"),
        *("os.ftruncate", "os.rmdir", "shutil.rmtree", "os.remove", "os.link"),
    }
    writers = {"_files", "_directories"}
    for module, source in read_sources().items():
        # the watch for signals writes to another's wakeup socket
        allowed = {"_signals": changing - {"os.write"}}.get(module, changing)
        assert module in writers or find_calls(source, allowed) == [], module
        if module not in (*writers, "_cli"):  # _cli points stdout at the null device
            for call in find_calls(source, {"os.open"}):
                assert "os.O_RDONLY" in call, module
    for module in writers:
        assert find_calls(read_sources()[module], changing)


def test_nothing_on_a_read_path_runs_code() -> None:
    forbidden = {"eval", "exec", "compile", "__import__", "import_module"}
    forbidden |= {"importlib.import_module"}
    for module, source in read_sources().items():
        assert not {"pickle", "marshal", "shelve", "dill"} & set(
            runtime_imports(source)
        )
        names = {
            ast.unparse(node.func)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Call)
        }
        # what the command line names is the user's own code; no file names any
        assert not forbidden & names or module == "_loading", module
        if "_loading" in internal_imports(source):
            assert module == "_plan_commands"


HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "chex", "rich")
LIGHT_IMPORTS = [
    "import ajaxckpt",
    "from ajaxckpt import open_checkpoint, verify_checkpoint, checkpoint_exists",
    "import ajaxckpt._cli",
]


@pytest.mark.parametrize("statement", LIGHT_IMPORTS)
def test_importing_loads_no_jax(statement: str) -> None:
    code = f"{statement}\nimport sys\nprint([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_importing_the_package_loads_nothing_at_all() -> None:
    code = (
        "import sys; before = set(sys.modules)\nimport ajaxckpt\n"
        "print(sorted(m.split('.')[0] for m in set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "numpy" not in done.stdout


def test_public_names_are_these() -> None:
    import ajaxckpt

    assert sorted(ajaxckpt.__all__) == ajaxckpt.__all__
    for name in ajaxckpt.__all__:
        public = getattr(ajaxckpt, name)
        assert public.__doc__, name
    assert dir(ajaxckpt) == ajaxckpt.__all__
    with pytest.raises(AttributeError, match="no attribute 'save'"):
        _ = ajaxckpt.save  # type: ignore[attr-defined]
