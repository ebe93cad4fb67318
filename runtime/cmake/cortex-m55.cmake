# SPDX-License-Identifier: Apache-2.0
#
# Cross-compiles for a Cortex-M55 without an operating system, with Arm's GNU toolchain (Debian:
# gcc-arm-none-eabi, libnewlib-arm-none-eabi, libstdc++-arm-none-eabi-newlib). CMAKE_CXX_FLAGS on the command
# line takes the place of the flags here.
set(CMAKE_SYSTEM_NAME Generic)
set(CMAKE_SYSTEM_PROCESSOR cortex-m55)
set(CMAKE_C_COMPILER arm-none-eabi-gcc)
set(CMAKE_CXX_COMPILER arm-none-eabi-g++)
# Linking a program takes a board's start-up code and memory map; a library is enough to try the compiler.
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
# Numbers in registers of the floating point unit, as boards link: with GCC's own setting, "soft", neither that unit nor
# the vector extension is used, and the linker refuses libraries of both kinds in one program.
set(CMAKE_C_FLAGS_INIT "-mcpu=cortex-m55 -mthumb -mfloat-abi=hard")
set(CMAKE_CXX_FLAGS_INIT "-mcpu=cortex-m55 -mthumb -mfloat-abi=hard -fno-exceptions -fno-rtti")
