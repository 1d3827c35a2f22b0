"""Builds the package: folders mapped under `sdpa`, the native libraries by ninja, and one wheel for every Python."""

import os
import platform
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from sysconfig import get_path

ROOT = Path(__file__).resolve().parent
# Hugging Face's `kernels` hooks into setuptools; with our root on the path the hook would import our folder instead.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

from setuptools import Distribution, find_packages, setup  # noqa: E402
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build import build  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402

MAPPED = {"sdpa": "sdpa"} | {f"sdpa.{name}": name for name in ("dispatch", "kernels", "tuning_tables", "bench")}
LIBRARY = "kernels/cpu/libsdpa_cpu.so"
CUDA_LIBRARY = "kernels/cuda/libsdpa_cuda.so"
# The operators of programs without Python, which finds the CPU's library beside itself.
STANDALONE = "kernels/cpu/libsdpa_operators.so"
STANDALONE_SOURCE = "kernels/cpu/standalone/operators.cpp"
# Calls CPython by its limited API, so that one build serves every Python from 3.10 on.
REPEATED = "sdpa/repeated/_native.abi3.so"
OBJECTS = "build/native"

OLDEST_TORCH = (2, 10)  # the first whose stable ABI has all that the library uses
TORCH_TARGET = "0x020a000000000000"  # the same version, as torch's headers want it
# NDEBUG leaves out the asserts of preconditions, which are for the build under sanitizers (tests/sanitize).
COMMON_FLAGS = (
    "-std=c++17 -O3 -DNDEBUG -fPIC -fvisibility=hidden -fno-math-errno -Wall -Wextra -Werror=return-type "
    f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"
)
# Families of machines by how the compiler calls its target; each is a macro, too.
FAMILIES = {"x86_64": "X86", "amd64": "X86", "aarch64": "ARM", "arm64": "ARM"}
AVX2 = "-mavx2 -mfma -mf16c"
AVX512 = f"{AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl"
# A tile of 24 accumulators leaves 8 registers: GCC 12, free to load early, puts accumulators in memory. No option of
# Clang's.
GCC_NEON = "-fno-schedule-insns"
# A source is built for the instruction set that ends its name, and left out on machines of another family.
AVX512BF16 = f"{AVX512} -mavx512bf16"
ISA_FLAGS = {
    "X86": {"_avx2": AVX2, "_avx512": AVX512, "_avx512bf16": AVX512BF16, "_amx": f"{AVX512BF16} -mamx-tile -mamx-bf16"},
    "ARM": {"_neon": "-march=armv8-a", "_neonbf16": "-march=armv8.2-a+bf16"},
}
# A symbol that torch does not have fails this link and not a user's import.
LINK_FLAGS = "-ltorch_cpu -ldl -Wl,--as-needed,-z,defs"
# Apple's linker has none of these options. torch, whose libraries are named by @rpath, is loaded before ours, or lies
# beside our package.
MAC_LINK_FLAGS = "-ltorch_cpu -Wl,-rpath,@loader_path/../../../torch/lib -undefined dynamic_lookup"
MAC_PYTHON_LINK_FLAGS = "-undefined dynamic_lookup"
SYSTEMS = ("linux", "darwin")

INSTANCE = re.compile(r"^(INSTANCE\(\w+, \w+, (\d+), (\d+), .*\))$", re.M)  # a line of a list, its head sizes
# Of the products that CuTe's headers declare, choose and describe, those of two float16 or bfloat16 summed in float32
# are ours. The others are 9 of 10. Without them a source is read in 10 s of processor time, with them in 49.
PRODUCT = re.compile(
    r"^(?:template <[^<>{};]*>\s*)?(?:struct \w*MMA_[^{;]*64x[^{;]*\{.*?^\};|using SM90_[^;]*;[^\n]*)\n"
    r"|^ *return SM90::GMMA::[^;]*;\n",
    re.M | re.S,
)
OUR_PRODUCT = re.compile(r"_64x\d+x16_F32(?:BF16BF16|F16F16)_[RS]S\b")
OLDEST_NVCC = (12, 4)  # what CUTLASS wants for Hopper
# What ptxas reports of every kernel; of a shipped one all of these are 0.
IN_MEMORY = re.compile(r"(\d+) bytes (stack frame|spill stores|spill loads)")
# What it says where it has to put the warpgroups' products one after the other.
IN_A_ROW = re.compile(r".*(?:wgmma.*serialized|C75\d\d).*")
CUDA_FLAGS = (
    "-std=c++17 -O3 --use_fast_math -DNDEBUG "
    "-gencode arch=compute_90a,code=sm_90a --expt-relaxed-constexpr --expt-extended-lambda "
    "-Xcompiler -fPIC,-fvisibility=hidden -Xptxas -v"
)
# torch for a CPU has no libtorch_cuda.so to link with; this stands for the one function that is asked of it.
STUB = 'extern "C" __attribute__((visibility("default"))) int aoti_torch_get_current_cuda_stream() { return 1; }'


def packages() -> list[str]:
    """Every mapped folder and what lies below it, once: `link_mapped` shows some of them below `sdpa`, too."""
    below = {name: find_packages(str(ROOT / folder)) for name, folder in MAPPED.items()}
    return sorted({*below, *(f"{name}.{package}" for name, found in below.items() for package in found)})


def link_mapped() -> None:
    """Links below `sdpa/` to the folders that are mapped there: editors and type checkers follow folders only.

    Git ignores them. Without them the code runs all the same, so a file system that has no links is no error.
    """
    for name, folder in MAPPED.items():
        place = ROOT.joinpath(*name.split("."))
        if place.exists():
            continue
        try:
            place.symlink_to(os.path.relpath(ROOT / folder, place.parent), target_is_directory=True)
        except OSError as error:
            print(f"no link {place}, so editors will not find {name}: {error}")


def torch_folder() -> Path:
    """Where torch's headers and libraries are; torch itself is not imported, which takes seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("building sdpa needs torch >= 2.10 for its headers; got none: pip install torch")
    found = version("torch")
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST_TORCH:
        raise SystemExit(f"building sdpa needs torch >= 2.10 for its headers; got {found}")
    return Path(spec.origin).parent


def cxx() -> str:
    for candidate in (os.environ.get("CXX"), "g++", "c++"):
        if candidate and shutil.which(candidate.split()[0]):
            return candidate
    raise SystemExit("building sdpa needs a C++ compiler; got none: install g++, or set CXX")


def ninja() -> str:
    if find_spec("ninja"):
        from ninja import BIN_DIR

        return str(Path(BIN_DIR) / "ninja")
    if found := shutil.which("ninja"):
        return found
    raise SystemExit("building sdpa needs ninja; got none: pip install ninja")


def compiler_says(*options: str) -> str:
    """What the compiler answers."""
    return subprocess.run([*cxx().split(), *options], capture_output=True, text=True, check=False).stdout.strip()


@cache
def target() -> str:
    """What the compiler, which may be a cross compiler, builds for, as "aarch64-linux-gnu"."""
    return compiler_says("-dumpmachine")


def family() -> str | None:
    """The machines that the compiler builds for: "X86", "ARM", or none of these."""
    return FAMILIES.get(target().partition("-")[0])


def is_for_mac() -> bool:
    return "-apple-" in target()


@cache
def is_clang() -> bool:
    """Whether the compiler is Clang, by whatever name: that of macOS is."""
    return is_for_mac() or "clang" in compiler_says("--version")


def require_platform() -> None:
    """Ends the build where nothing of ours would run, in one sentence."""
    if sys.platform not in SYSTEMS:
        raise SystemExit(f"sdpa is built on Linux and on macOS; got {sys.platform}")
    if is_for_mac() and family() != "ARM":
        raise SystemExit(f"sdpa is built for Macs with Apple silicon, as torch is; got a compiler for {target()}")


def common_flags() -> str:
    return COMMON_FLAGS + (f" -DSDPA_{family()}" if family() else "") + given("CXXFLAGS")


def given(variable: str) -> str:
    """The flags of a standard variable, CXXFLAGS or LDFLAGS, to stand behind ours."""
    return " ".join(["", *os.environ.get(variable, "").split()])


def torch_flags(torch: Path) -> str:
    """Finds torch's headers; what their checks say names a header, and not where it lies on the machine that builds."""
    return f"-isystem {torch}/include -fmacro-prefix-map={torch}/include/="


def isa_flags(source: Path) -> str | None:
    """The flags of one source; None where it is for machines of another family."""
    for machines, sets in ISA_FLAGS.items():
        for suffix, flags in sets.items():
            if source.stem.endswith(suffix):
                return isa_flags_here(machines, suffix, flags) if machines == family() else None
    return ""


def isa_flags_here(machines: str, suffix: str, flags: str) -> str:
    """The flags of an instruction set as this compiler takes them."""
    if machines != "ARM":
        return flags
    if is_for_mac() and suffix == "_neon":  # every Mac's processor has more than armv8-a, and its compiler knows
        return ""
    return flags if is_clang() else f"{GCC_NEON} {flags}"


def nvcc() -> str | None:
    """The CUDA compiler on the PATH or under CUDA_HOME; None where there is none that is new enough."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    found = shutil.which("nvcc") or next((f"{h}/bin/nvcc" for h in homes if h and Path(h, "bin/nvcc").exists()), None)
    if found is None:
        return None
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+)\.(\d+)", said)
    return found if release is not None and tuple(map(int, release.groups())) >= OLDEST_NVCC else None


def cuda_home(compiler: str) -> Path:
    """Where the compiler, which may be a script that calls another, has its headers and libraries."""
    plan = subprocess.run([compiler, "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=False)
    return Path(re.search(r"TOP=(\S+)", plan.stdout + plan.stderr)[1]).resolve()


def cutlass() -> Path | None:
    """CUTLASS' headers, of PyPI's nvidia-cutlass; they are needed to build only."""
    spec = find_spec("cutlass_library")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "source" / "include"


def shorten(headers: Path, to: Path) -> None:
    """Copies of CuTe's headers of products with our products only, to be found before those; `to` has no other file."""
    found = [*headers.glob("cute/*/mma_*sm90_gmma*.hpp"), *headers.glob("cute/arch/mma_sm90.hpp")]
    copies = {to / path.relative_to(headers): path for path in found}
    for stale in set(to.rglob("*.hpp")) - set(copies):  # of another CUTLASS
        stale.unlink()
    for copy, path in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_if_new(copy, without_others_products(path.read_text()))


def without_others_products(text: str) -> str:
    return PRODUCT.sub(lambda m: m[0] if OUR_PRODUCT.search(m[0].partition("{")[0]) else "", text)


def cuda_text(torch: Path, compiler: str, headers: Path) -> list[str]:
    """The lines of ninja for the CUDA library: a source is written for each head size in a list of instances."""
    home, folder, made = cuda_home(compiler), Path(CUDA_LIBRARY).parent, Path(OBJECTS, "cuda")
    (ROOT / made).mkdir(parents=True, exist_ok=True)
    write_if_new(ROOT / made / "stub.cpp", STUB)
    shorten(headers, ROOT / made / "include")
    lines = [
        "rule compile_cuda",
        f"  command = {compiler} {CUDA_FLAGS} -I{folder} -isystem {made}/include -isystem {headers} "
        f"-isystem {home}/include/cccl -MMD -MF $out.d -c $in -o $out 2> $out.log || (cat $out.log; false)",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule compile_bindings",
        f"  command = {cxx()} {common_flags()} -DUSE_CUDA {torch_flags(torch)} -isystem {home}/include "
        "-MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule stub",
        f"  command = {cxx()} -shared -fPIC -Wl,-soname,libtorch_cuda.so $in -o $out",
        "rule link_cuda",
        f"  command = {cxx()} -shared $objects -o $out -L{made} -L{torch}/lib -L{home}/lib64 -lcudart_static -ldl -lrt "
        f"-lpthread -ltorch_cpu -l:libtorch_cuda.so -Wl,--exclude-libs,ALL,-z,defs{given('LDFLAGS')}",
        f"build {made}/libtorch_cuda.so: stub {made}/stub.cpp",
    ]
    objects = [f"{made}/{source.stem}.o" for source in sorted((ROOT / folder).glob("*.cpp"))]
    lines += [f"build {name}: compile_bindings {folder}/{Path(name).stem}.cpp" for name in objects]
    by_head_size: dict[tuple[str, str], list[str]] = {}  # CuTe's headers are read once for each
    for prefix in ("", "backward_"):
        for line, *sizes in INSTANCE.findall((ROOT / folder / f"{prefix}instances.def").read_text()):
            by_head_size.setdefault((prefix, "_".join(dict.fromkeys(sizes))), []).append(line)
    for (prefix, sizes), instances in by_head_size.items():
        source = made / f"flash_{prefix}{sizes}.cu"
        write_if_new(ROOT / source, "\n".join([f'#include "{prefix}instance.cuh"', *instances, ""]))
        objects.append(f"{source.with_suffix('.o')}")
        lines.append(f"build {objects[-1]}: compile_cuda {source}")
    named = " ".join(objects)
    return [*lines, f"build {CUDA_LIBRARY}: link_cuda {named} {made}/libtorch_cuda.so", f"  objects = {named}"]


def write_if_new(path: Path, text: str) -> None:
    """A source that did not change keeps its time, and so its object."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def faults(said: str) -> list[str]:
    """Of ptxas' messages, those for which a kernel may not be shipped."""
    return [m[0] for m in IN_MEMORY.finditer(said) if int(m[1])] + IN_A_ROW.findall(said)


def refuse_faults() -> None:
    """Ends the build where an instance spills; neither the library stays nor the object, so that it is made again."""
    for log in sorted((ROOT / OBJECTS / "cuda").glob("*.log")):
        if found := faults(log.read_text()):
            for made in (log.with_suffix(""), ROOT / CUDA_LIBRARY):
                made.unlink(missing_ok=True)
            raise SystemExit(f"{log.name.partition('.')[0]} is not shipped so: {'; '.join(found)}")


def ninja_text(torch: Path) -> str:
    """One object per source with its own flags, one library each; paths are relative: a moved tree stays built."""
    require_platform()
    lines = [
        f"builddir = {OBJECTS}",
        "rule compile",
        f"  command = {cxx()} {common_flags()} $isa {torch_flags(torch)} -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {cxx()} -shared $in -o $out -L{torch}/lib {MAC_LINK_FLAGS if is_for_mac() else LINK_FLAGS}"
        + given("LDFLAGS"),
    ]
    objects = []
    for source in sorted((ROOT / LIBRARY).parent.glob("*.cpp")):
        if (flags := isa_flags(source)) is not None:
            objects.append(f"{OBJECTS}/{source.stem}.o")
            lines += [f"build {objects[-1]}: compile {source.relative_to(ROOT)}", f"  isa = {flags}"]
    lines.append(f"build {LIBRARY}: link {' '.join(objects)}")
    alone = f"{OBJECTS}/standalone.o"
    lines += [f"build {alone}: compile {STANDALONE_SOURCE}", f"build {STANDALONE}: link {alone}"]
    lines += python_text()
    compiler, headers = nvcc(), cutlass()
    if os.environ.get("SDPA_BUILD_CUDA") == "0":
        print("SDPA_BUILD_CUDA is 0: the CUDA kernels are not built")
    elif family() != FAMILIES.get(platform.machine().lower()):
        print("the compiler builds for other machines than this: the CUDA kernels are not built")
    elif sys.platform != "linux" or compiler is None:
        print("no nvcc from CUDA 12.4 on: the CUDA kernels are not built")
    elif headers is None:
        print("no CUTLASS (pip install --no-deps nvidia-cutlass==4.2.0.0): the CUDA kernels are not built")
    else:
        print("building the CUDA kernels, too; SDPA_BUILD_CUDA=0 leaves them out")
        lines += cuda_text(torch, compiler, headers)
    return "\n".join([*lines, ""])


def python_text() -> list[str]:
    """The lines of ninja for what is called by Python itself; none without Python's headers."""
    include = get_path("include")
    if not Path(include, "Python.h").exists():
        print(f"no Python.h in {include} (Debian and Ubuntu: python3-dev): repeated calls will take longer")
        return []
    flags = "-std=c++17 -O3 -DNDEBUG -fPIC -fvisibility=hidden -fno-exceptions -fno-rtti -Wall -Wextra"
    sources = sorted((ROOT / REPEATED).parent.glob("*.cpp"))
    objects = {f"{OBJECTS}/python/{source.stem}.o": source.relative_to(ROOT) for source in sources}
    return [
        "rule compile_python",
        f"  command = {cxx()} {flags}{given('CXXFLAGS')} -isystem {include} -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link_python",
        f"  command = {cxx()} -shared $in -o $out {MAC_PYTHON_LINK_FLAGS if is_for_mac() else ''}" + given("LDFLAGS"),
        *(f"build {made}: compile_python {source}" for made, source in objects.items()),
        f"build {REPEATED}: link_python {' '.join(objects)}",
    ]


class BuildNative(build_ext):
    """Brings the library up to date beside its loader; a wheel gets a copy, a checkout the links of the mapping."""

    def run(self) -> None:
        script = ROOT / OBJECTS / "build.ninja"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(ninja_text(torch_folder()))
        if subprocess.run([ninja(), "-C", str(ROOT), "-f", str(script)], check=False).returncode:
            raise SystemExit("the native libraries did not build; the compiler's message is above")
        refuse_faults()
        if self.inplace:
            link_mapped()
        else:
            for library in filter(lambda name: (ROOT / name).exists(), (LIBRARY, STANDALONE, CUDA_LIBRARY)):
                shutil.copy2(ROOT / library, Path(self.build_lib, "sdpa", library))
            if (ROOT / REPEATED).exists():
                shutil.copy2(ROOT / REPEATED, Path(self.build_lib, REPEATED))


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
