# A CMake toolchain for another machine that needs no compiler or libraries of it: clang and the C libraries of the
# PyPI package `ziglang`.
#
#   cmake -S . -B build/arm64 -DCMAKE_TOOLCHAIN_FILE=runtime/cross.cmake -DCODA_TRIPLE=aarch64-linux-gnu.2.28
#
# CODA_PYTHON: the Python that has ziglang; the first `python` or `python3` on the PATH unless given.
# CODA_TRIPLE: machine-system-libc, with the oldest glibc that is to run it; musl programs are linked statically.

if(NOT CODA_TRIPLE)
  message(FATAL_ERROR "CODA_TRIPLE is not set: give the machine to build for, such as aarch64-linux-gnu.2.28")
endif()
# CMake reads this file again in each try_compile project, which sees of the cache only what is listed here.
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES CODA_TRIPLE CODA_PYTHON)

find_program(CODA_PYTHON NAMES python python3)
execute_process(
  COMMAND "${CODA_PYTHON}" -c "import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), 'zig'))"
  OUTPUT_VARIABLE CODA_ZIG OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE CODA_ZIG_MISSING)
if(CODA_ZIG_MISSING)
  message(FATAL_ERROR "${CODA_PYTHON} has no package ziglang: pip install ziglang")
endif()

string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR "${CODA_TRIPLE}")
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_C_COMPILER "${CODA_ZIG}" cc -target "${CODA_TRIPLE}")
set(CMAKE_SHARED_LINKER_FLAGS_RELEASE_INIT "-s")
