# SPDX-License-Identifier: Apache-2.0
#
# Cross-compiles for a Cortex-M55 without an operating system, with Arm's GNU toolchain (Debian:
# gcc-arm-none-eabi, libnewlib-arm-none-eabi, libstdc++-arm-none-eabi-newlib). CMAKE_CXX_FLAGS on the command
# line replaces the flags of this file.
set(CMAKE_SYSTEM_NAME Generic)
set(CMAKE_SYSTEM_PROCESSOR cortex-m55)
set(CMAKE_C_COMPILER arm-none-eabi-gcc)
set(CMAKE_CXX_COMPILER arm-none-eabi-g++)
# Test the compiler with a library, because linking a program requires a board's start-up code and memory map.
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
# Use the hard-float ABI, as boards do. With GCC's default, "soft", the compiler uses neither the floating point unit
# nor the vector extension (MVE). The linker refuses to combine objects of both ABIs in one program.
set(CMAKE_C_FLAGS_INIT "-mcpu=cortex-m55 -mthumb -mfloat-abi=hard")
set(CMAKE_CXX_FLAGS_INIT "-mcpu=cortex-m55 -mthumb -mfloat-abi=hard -fno-exceptions -fno-rtti")
