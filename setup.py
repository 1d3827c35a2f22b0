"""Builds the package: folders mapped under `sdpa`, the CPU library by ninja, and one wheel for every Python."""

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent
# Hugging Face's `kernels` hooks into setuptools; with our root on the path the hook would import our folder instead.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

from setuptools import Distribution, find_packages, setup  # noqa: E402
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build import build  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402

MAPPED = {
    "sdpa": "sdpa",
    "sdpa.dispatch": "dispatch",
    "sdpa.kernels": "kernels",
    "sdpa.tuning_tables": "tuning_tables",
    "sdpa.bench": "bench",
}
LIBRARY = "kernels/cpu/libsdpa_cpu.so"
OBJECTS = "build/native"

OLDEST_TORCH = (2, 10)  # the first whose stable ABI has all that the library uses
TORCH_TARGET = "0x020a000000000000"  # the same version, as torch's headers want it
X86 = platform.machine().lower() in ("x86_64", "amd64")
COMMON_FLAGS = (
    "-std=c++17 -O3 -fPIC -fvisibility=hidden -fno-math-errno -Wall -Wextra -Werror=return-type "
    f"-DTORCH_TARGET_VERSION={TORCH_TARGET}" + (" -DSDPA_X86" if X86 else "")
)
AVX2 = "-mavx2 -mfma -mf16c"
AVX512 = f"{AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl"
# A source is built for the instruction set that ends its name, and left out on machines of another family.
ISA_FLAGS = {"_avx2": AVX2, "_avx512": AVX512, "_avx512bf16": f"{AVX512} -mavx512bf16"}
# On Linux a symbol that torch does not have fails this link and not a user's import; elsewhere the loader finds torch.
LINK_FLAGS = "-ltorch_cpu -Wl,--as-needed,-z,defs" if sys.platform == "linux" else "-undefined dynamic_lookup"


def packages() -> list[str]:
    """Every mapped folder and what lies below it."""
    below = {name: find_packages(str(ROOT / folder)) for name, folder in MAPPED.items()}
    return [*below, *(f"{name}.{package}" for name, found in below.items() for package in found)]


def torch_folder() -> Path:
    """Where torch's headers and libraries are; torch itself is not imported, which takes seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("building sdpa-kernels needs torch >= 2.10 for its headers; got none: pip install torch")
    found = version("torch")
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST_TORCH:
        raise SystemExit(f"building sdpa-kernels needs torch >= 2.10 for its headers; got {found}")
    return Path(spec.origin).parent


def compiler() -> str:
    for candidate in (os.environ.get("CXX"), "g++", "c++"):
        if candidate and shutil.which(candidate.split()[0]):
            return candidate
    raise SystemExit("building sdpa-kernels needs a C++ compiler; got none: install g++, or set CXX")


def ninja() -> str:
    if find_spec("ninja"):
        from ninja import BIN_DIR

        return str(Path(BIN_DIR) / "ninja")
    if found := shutil.which("ninja"):
        return found
    raise SystemExit("building sdpa-kernels needs ninja; got none: pip install ninja")


def isa_flags(source: Path) -> str:
    return next((flags for suffix, flags in ISA_FLAGS.items() if source.stem.endswith(suffix)), "")


def ninja_text(torch: Path) -> str:
    """One object per source with its own flags, one library; paths are relative, so that a moved tree stays built."""
    cxx = compiler()
    lines = [
        f"builddir = {OBJECTS}",
        "rule compile",
        f"  command = {cxx} {COMMON_FLAGS} $isa -isystem {torch}/include -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {cxx} -shared $in -o $out -L{torch}/lib {LINK_FLAGS}",
    ]
    objects = []
    for source in sorted((ROOT / LIBRARY).parent.glob("*.cpp")):
        flags = isa_flags(source)
        if flags and not X86:
            continue
        objects.append(f"{OBJECTS}/{source.stem}.o")
        lines += [f"build {objects[-1]}: compile {source.relative_to(ROOT)}", f"  isa = {flags}"]
    return "\n".join([*lines, f"build {LIBRARY}: link {' '.join(objects)}", ""])


class BuildNative(build_ext):
    """Brings the library up to date beside its loader; a wheel gets a copy."""

    def run(self) -> None:
        script = ROOT / OBJECTS / "build.ninja"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(ninja_text(torch_folder()))
        if subprocess.run([ninja(), "-C", str(ROOT), "-f", str(script)], check=False).returncode:
            raise SystemExit("the CPU library did not build; the compiler's message is above")
        if not self.inplace:
            shutil.copy2(ROOT / LIBRARY, Path(self.build_lib, "sdpa", LIBRARY))


class Build(build):
    """Starts from an empty folder: files that left the tree must not stay in the wheel."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class PlatformWheel(bdist_wheel):
    """py3-none-<platform>: machine code, but no Python ABI in it."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(
    packages=packages(),
    package_dir=MAPPED,
    ext_modules=[],
    cmdclass={"build": Build, "build_ext": BuildNative, "bdist_wheel": PlatformWheel},
    distclass=BinaryDistribution,
)
