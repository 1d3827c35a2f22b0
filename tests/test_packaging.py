"""The wheel and the editable install: the mapping of folders, what is in them, and the traps on the way."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("sdpa", "dispatch", "kernels", "tuning_tables", "bench")
LIBRARY = "sdpa/kernels/cpu/libsdpa_cpu.so"
OPERATORS = "sdpa/kernels/cpu/libsdpa_operators.so"
HEAVY = ("triton", "matplotlib", "rich", "click")


def python(code: str, **options) -> str:
    """Standard output of a fresh interpreter; fails with its standard error."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def rival(tmp_path_factory) -> Path:
    """A folder with packages named `kernels` and `dispatch`; like Hugging Face's, `kernels` hooks into setuptools."""
    folder = tmp_path_factory.mktemp("rival")
    for name in ("kernels", "dispatch"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("rival = True\n")
    (folder / "kernels" / "lockfile.py").write_text(
        "def write(command, name, path):\n    command.write_file(name, path, 'x')\n"
    )
    info = folder / "kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[egg_info.writers]\nkernels.lock = kernels.lockfile:write\n")
    return folder


@pytest.fixture(scope="session")
def wheel(tmp_path_factory, rival) -> Path:
    """The wheel, built offline from a copy of the tree; objects that are up to date are not compiled again."""
    tree, out = tmp_path_factory.mktemp("tree") / "project", tmp_path_factory.mktemp("wheel")
    unwanted = ("aarch64", "wheelhouse", ".git", ".venv*", "dist", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*unwanted))
    stale = tree / "build" / "lib" / "sdpa" / "removed_long_ago.py"
    stale.parent.mkdir(parents=True, exist_ok=True)
    stale.touch()
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    environment = os.environ | {"PYTHONPATH": str(rival)}
    done = subprocess.run(
        [*pip, "--wheel-dir", out, tree], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder that holds the wheel's files and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_wheel_fits_every_python_of_one_platform(wheel):
    assert re.fullmatch(r"sdpa-[\d.]+-py3-none-(linux|macosx|manylinux)\w+\.whl", wheel.name), wheel.name


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {LIBRARY, OPERATORS} <= set(names)
    assert {"sdpa/py.typed", "sdpa/tuning_tables/__init__.py", "sdpa/bench/__init__.py"} <= set(names)
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"sdpa"}
    assert not [name for name in names if name.endswith((".cpp", ".h", ".o")) or "test_" in name]
    assert "sdpa/removed_long_ago.py" not in names


def test_wheel_holds_every_module_and_table(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in MAPPED:
        prefix = "sdpa" if folder == "sdpa" else f"sdpa/{folder}"
        patterns = ("**/*.py", "*.yaml", "*.c", "**/*.metal")
        for path in (path for pattern in patterns for path in (ROOT / folder).glob(pattern)):
            assert f"{prefix}/{path.relative_to(ROOT / folder).as_posix()}" in names


def test_wheel_runs_without_a_compiler_or_the_checkout(installed, tmp_path):
    code = (
        "import torch, sdpa; q = torch.randn(1, 2, 8, 4);"
        "sdpa.scaled_dot_product_attention(q, q, q, kernel='cpu_flash'); print(sdpa.__file__)"
    )
    environment = os.environ | {"PYTHONPATH": str(installed), "PATH": ""}
    assert python(code, cwd=tmp_path, env=environment).strip() == str(installed / "sdpa" / "__init__.py")


def broken_wheel(installed: Path, to: Path, keep: int | None) -> str:
    """What the first import and a call say, on standard error, where the CPU library is cut off or absent."""
    shutil.copytree(installed, to)
    library = to / LIBRARY
    if keep is None:
        library.unlink()
    else:
        library.write_bytes(library.read_bytes()[:keep])
    code = "import torch, sdpa; q = torch.randn(1, 2, 8, 4); sdpa.scaled_dot_product_attention(q, q, q)"
    environment = os.environ | {"PYTHONPATH": str(to)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=to, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="cuts an ELF file off")
@pytest.mark.parametrize(
    ("keep", "what"),
    [
        (None, "does not exist"),
        (0, "was cut off"),
        (10, "was cut off"),
        (5000, "was cut off"),
        (900_000, "was cut off"),
    ],
)
def test_a_broken_library_is_a_sentence_with_its_remedy(installed, tmp_path, keep, what):
    """A bus error would end the process where a library that was cut off is loaded."""
    said = broken_wheel(installed, tmp_path / "installed", keep)
    assert f"{tmp_path}/installed/{LIBRARY} {what}" in said and "Traceback" not in said
    assert "pip install --force-reinstall --no-deps sdpa" in said


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("sdpa-0.1.0-py3-none-win_amd64.whl", None, "is not a supported wheel on this platform"),
        ("sdpa-0.1.0-py3-none-any.whl", 10_000, "is invalid"),
    ],
)
def test_pip_refuses_what_cannot_work(wheel, tmp_path, name, size, said):
    (tmp_path / name).write_bytes(wheel.read_bytes()[:size])
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--dry-run", "--target", tmp_path / "to"]
    done = subprocess.run([*pip, tmp_path / name], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and said in done.stderr, done.stderr


def test_the_command_comes_with_what_it_needs(installed):
    (metadata,) = installed.glob("*.dist-info/METADATA")
    required = {
        line.partition(": ")[2] for line in metadata.read_text().splitlines() if line.startswith("Requires-Dist")
    }
    assert {"torch>=2.10", "click", "rich", "numpy", "pyyaml"} <= required
    assert "sdpa = sdpa.cli:main" in (metadata.parent / "entry_points.txt").read_text()


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        ("__version__ = '2.9.1+cu128'", "and got 2.9.1+cu128: pip install --upgrade 'torch>=2.10'"),
        ("raise ModuleNotFoundError('none', name='torch')", "and there is none: pip install 'torch>=2.10'"),
    ],
)
def test_a_torch_that_is_too_old_is_one_sentence(installed, tmp_path, torch, said):
    (tmp_path / "torch.py").write_text(torch)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(installed)])}
    for command in (("-c", "import sdpa"), ("-m", "sdpa.cli", "info")):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == f"ImportError: sdpa needs torch 2.10 or newer, {said}"


def test_wheel_does_not_shadow_the_bare_names(installed, rival, tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(installed), str(rival)])}
    python(
        "import sdpa, kernels, dispatch, sdpa.kernels; assert kernels.rival and dispatch.rival; "
        "assert not hasattr(sdpa.kernels, 'rival')",
        cwd=tmp_path,
        env=environment,
    )


@pytest.mark.parametrize("folder", MAPPED)
def test_mapped_folders_are_imported_under_sdpa(folder):
    name = "sdpa" if folder == "sdpa" else f"sdpa.{folder}"
    assert Path(importlib.import_module(name).__file__).parent.name == folder


def test_every_package_has_an_init_file_and_tests_have_none():
    for folder in MAPPED:
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The Python files of a fresh clone, without links."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "results", *MAPPED)
    for folder in MAPPED:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy2(ROOT / "setup.py", tmp_path)
    return tmp_path


def link(checkout: Path) -> None:
    """What a build does for editors."""
    code = "import runpy, sys; sys.argv = ['setup.py', '--version']; runpy.run_path('setup.py')['link_mapped']()"
    python(code, cwd=checkout)


def found(module: str, checkout: Path) -> Path | None:
    """The file of a module for whoever looks into folders only and runs no import hook, as editors and checkers do."""
    places, spec, parts = [str(checkout)], None, module.split(".")
    for end in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:end]), places)
        if spec is None:
            return None
        places = spec.submodule_search_locations
    return Path(spec.origin).resolve()


def test_folders_alone_show_the_mapping(checkout):
    assert found("sdpa.dispatch.select", checkout) is None
    link(checkout)
    for folder in MAPPED[1:]:
        for path in (checkout / folder).rglob("*.py"):
            parts = ("sdpa", *path.relative_to(checkout).with_suffix("").parts)
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            assert found(module, checkout) == path.resolve()


def test_whoever_starts_python_in_the_sources_is_told_so(checkout):
    """An editable install maps the folders by names, and would hide it."""
    code = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]; import sdpa"
    done = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: Python looks into the current folder first") and f"{checkout}/sdpa" in last
    link(checkout)
    python(code, cwd=checkout)


def test_links_are_made_once_and_new_files_join_by_themselves(checkout):
    link(checkout)
    before = {name: (checkout / "sdpa" / name).readlink() for name in MAPPED[1:]}
    (checkout / "dispatch" / "later.py").touch()
    assert found("sdpa.dispatch.later", checkout) is not None
    link(checkout)
    assert before == {name: Path("..", name) for name in MAPPED[1:]}
    assert before == {name: (checkout / "sdpa" / name).readlink() for name in MAPPED[1:]}


def test_packages_are_the_same_with_links(checkout):
    code = "import runpy, sys; sys.argv = ['setup.py', '--version']; print(runpy.run_path('setup.py')['packages']())"
    without = python(code, cwd=checkout)
    link(checkout)
    assert python(code, cwd=checkout) == without


def test_mypy_finds_what_is_mapped(checkout):
    pytest.importorskip("mypy", reason="mypy is not installed; `make .venv/installed` installs it")
    code = "import sdpa.dispatch.select, sdpa.kernels.math.composite, sdpa.tuning_tables, sdpa.bench.timing"
    command = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=skip", "--cache-dir", os.devnull]
    link(checkout)
    done = subprocess.run([*command, "-c", code], cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    for folder in MAPPED[1:]:
        (checkout / "sdpa" / folder).unlink()
    done = subprocess.run([*command, "-c", code], cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "[import-not-found]" in done.stdout, done.stdout


def test_checks_are_not_switched_off_as_a_whole():
    # Per file single checks may be off, which pyproject.toml lists; mypy itself refuses an ignore without a code.
    text = (ROOT / "pyproject.toml").read_text()
    assert "ignore_errors" not in text and '"ignore-without-code"' in text
    assert not [p for folder in MAPPED for p in (ROOT / folder).rglob("*.py") if "# mypy:" in p.read_text()]


def test_backend_is_not_the_legacy_one():
    # The legacy backend is what pip falls to without this line; it puts our `kernels` first on the path.
    assert 'build-backend = "setuptools.build_meta"' in (ROOT / "pyproject.toml").read_text().splitlines()


def test_setup_keeps_our_folders_from_the_hooks_of_setuptools(rival, tmp_path):
    # `python setup.py` starts with our root on the path, and the hook of the rival imports `kernels.lockfile`.
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(rival)}, check=True)
    assert (tmp_path / "sdpa.egg-info" / "kernels.lock").read_text() == "x"


def test_no_module_of_kernels_is_a_script():
    # A script's folder comes first on sys.path: kernels/triton would be imported for triton.
    for path in (ROOT / "kernels").rglob("*.py"):
        assert "__main__" not in path.read_text() and path.name != "__main__.py", path


def test_import_is_light():
    code = f"import sys, sdpa; print(*(name for name in {HEAVY} if name in sys.modules))"
    assert python(code).split() == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads the library as an ELF file")
def test_library_needs_torch_and_the_system_only():
    library = ROOT / "kernels" / "cpu" / "libsdpa_cpu.so"
    assert set(needed(library.read_bytes())) <= {
        "libtorch_cpu.so", "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "libpthread.so.0",
    }  # fmt: skip


def test_library_has_no_python_abi():
    names = re.findall(rb"\bPy[A-Z_]\w+", (ROOT / "kernels" / "cpu" / "libsdpa_cpu.so").read_bytes())
    assert names == []


def needed(elf: bytes) -> list[str]:
    """The DT_NEEDED names of a 64-bit little-endian ELF file."""
    dynamic_type, dt_needed = 6, 1  # SHT_DYNAMIC, DT_NEEDED
    (start,), (size, count) = struct.unpack_from("<Q", elf, 0x28), struct.unpack_from("<HH", elf, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, start + size * i) for i in range(count)]
    dynamic = next(section for section in sections if section[1] == dynamic_type)
    names = sections[dynamic[6]][4]  # the offset of the linked string table
    entries = struct.iter_unpack("<qQ", elf[dynamic[4] : dynamic[4] + dynamic[5]])
    return [elf[names + at : elf.index(b"\0", names + at)].decode() for tag, at in entries if tag == dt_needed]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_cutlass_lies_apart_and_only_where_it_is_wanted(tmp_path):
    """In .venv pip would print in red what its package requires, at every later installation."""
    steps = make_dry(tmp_path, "test-ordinary")
    (cutlass,) = (step for step in steps if "nvidia-cutlass" in step)
    assert cutlass.startswith('if [ "$SDPA_BUILD_CUDA" != 0 ] && command -v nvcc')
    assert f"--no-deps --upgrade --target {tmp_path}/venv/cutlass" in cutlass and "/cutlass.pth" in cutlass
    assert f"rm -r {tmp_path}/venv/cutlass/*.dist-info" in cutlass, "by which pip would find it"
    (build,) = (step for step in steps if "build_ext" in step)
    assert steps.index(cutlass) < steps.index(build) < next(n for n, step in enumerate(steps) if "--editable" in step)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_each_step_says_first_what_it_does_and_for_how_long(tmp_path):
    steps = make_dry(tmp_path)
    long = ("-m venv", "torch==", "nvidia-cutlass", "build_ext", "--editable", "train_gpt.py")
    for name in long:
        at = next(n for n, step in enumerate(steps) if name in step and not step.startswith("echo"))
        told = steps[at] if name == "nvidia-cutlass" else steps[at - 1]
        assert re.search(r'echo "[a-z].*: about ', told), (name, told)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_the_demo_compiles_no_cuda_kernels_that_no_gpu_would_run(tmp_path):
    def compiled(*arguments: str) -> str:
        return next(Path(step.split()[1]).name for step in make_dry(tmp_path, *arguments) if "/compiled" in step)

    assert compiled("GPUS=", "demo") == compiled("SDPA_BUILD_CUDA=0", "test-ordinary") == "compiled-without-cuda"
    for arguments in ("GPUS=/dev/nvidia0 demo", "GPUS= demo test-ordinary", "GPUS= SDPA_BUILD_CUDA=1 demo"):
        assert compiled(*arguments.split()) == "compiled"
    told = " ".join(make_dry(tmp_path, "GPUS=", "demo"))
    assert "without the CUDA kernels, for which no GPU is visible: about a minute" in told
    (tmp_path / "venv").mkdir()
    for stamp in ("compiled-without-cuda", "built-without-cuda"):  # what the demo made stands for no part of a test's
        (tmp_path / "venv" / stamp).touch()
    assert compiled("GPUS=", "test-ordinary") == "compiled"


def make_dry(tmp_path: Path, *arguments: str) -> list[str]:
    """The commands of a first `make demo`, or of other targets and variables; a command of several lines is one."""
    command = ["make", "--dry-run", f"VENV={tmp_path}/venv", *(arguments or ("demo",))]
    without = {name: value for name, value in os.environ.items() if name not in ("SDPA_BUILD_CUDA", "MAKEFLAGS")}
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=without).stdout
    return said.replace("\\\n", " ").splitlines()
