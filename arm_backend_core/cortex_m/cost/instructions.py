"""Numbers of instructions that CPU kernels execute per step (product, result, pixel), mostly measured.

We executed the kernels of CMSIS-NN 7, compiled by GCC 12.2 with -Ofast, in QEMU, which counts instructions
(``-icount shift=0``). There were 110 shapes and four processors, one for each code variant: Cortex-M0, M3, M4 and M55.
The numbers are coefficients of linear functions of the shapes, fitted to these counts; single coefficients may be
negative. ``tests/cortex_m/cost/test_kernels.py`` has some of the counts. "Rough" marks numbers without a measurement.
"""

from __future__ import annotations

from arm_backend_core.cortex_m.cost.processors import PerCodeVariant

#: Number of int8 lanes of an MVE vector. MVE code computes this many products of one result at once.
MVE_LANES = 16

# -- matrix products: per product (MVE: per vector of 16), and per result (requantization, saturation, store)
CONVOLUTION_RESULT = PerCodeVariant(98, 38, 44, 14)
CONVOLUTION_PRODUCT = PerCodeVariant(6.03, 2.52, 1.63, 2.8)
#: 1x1 convolutions read the input without a copy. DSP code loads the operands of two products at once.
POINTWISE_PRODUCT = PerCodeVariant(6.03, 2.52, 1.44, 2.8)
#: Copy of the inputs of one pixel (im2col): per tap of the window, and per copied element (int16 in DSP code).
IM2COL_TAP = PerCodeVariant(92, 58, 58, 26)
IM2COL_INPUT = PerCodeVariant(7.9, 5.2, 2.5, 0)
#: Number of pixels whose results are computed together. Remaining pixels cost ``SINGLE_PIXEL_PRODUCT`` per product.
PIXELS_TOGETHER = PerCodeVariant(2, 2, 2, 4)
SINGLE_PIXEL_PRODUCT = PerCodeVariant(11, 6.7, 5.1, 7.3)

LINEAR_RESULT = PerCodeVariant(100, 46, 52, 14)
LINEAR_PRODUCT = PerCodeVariant(6.03, 3.37, 1.87, 7.5)
MATMUL_RESULT = PerCodeVariant(103, 39, 54, 17.5)
MATMUL_PRODUCT = PerCodeVariant(11.2, 4.4, 1.94, 9.3)

# -- depthwise convolution: per result, per tap of a result, per pixel, per tap of a pixel
DEPTHWISE_RESULT = PerCodeVariant(225, 132, 59, 6.2)
DEPTHWISE_PRODUCT = PerCodeVariant(30, 12.5, 6.4, 1.19)
DEPTHWISE_PIXEL = PerCodeVariant(0, 0, 0, 115)
DEPTHWISE_TAP = PerCodeVariant(0, 0, 38, 12.8)
#: Window of 3x3 and padding of at most 1, without MVE: all nine taps are unrolled.
DEPTHWISE_3X3_RESULT = PerCodeVariant(337, 87, 76, 17)
DEPTHWISE_3X3_PIXEL = PerCodeVariant(72, 77, 99, 230)
#: Depthwise convolution with dilation, several batches or several results per channel. If the number of results per
#: channel is a multiple of four, the code computes four of them at once.
GENERIC_DEPTHWISE_RESULT = PerCodeVariant(60, 30, 30, 30)
GENERIC_DEPTHWISE_PRODUCT = PerCodeVariant(50, 24, 25, 24)
GENERIC_DEPTHWISE_PRODUCT_BY_FOUR = PerCodeVariant(13.3, 6.7, 7, 7)

# -- transposed convolution that adds products to accumulators (no upsampled input): per product, per addition to an
# accumulator, per result. For each input pixel, tap and output channel there is one addition to an accumulator. MVE
# code has one such addition for each vector of input channels.
TRANSPOSE_CONV_PRODUCT = PerCodeVariant(7.9, 3.6, 2.44, 0)
TRANSPOSE_CONV_TAP = PerCodeVariant(19.5, 14.1, 12.4, 22)
TRANSPOSE_CONV_RESULT = PerCodeVariant(109, 45, 46, 15)

# -- per element
ADD = PerCodeVariant(236, 84, 81, 13.8)
MUL = PerCodeVariant(89, 30, 36, 6.8)
#: Rough: two conversions to float, a division and a quantization. MVE code divides element by element.
DIV_WITH_FPU, DIV_WITHOUT_FPU = 70, PerCodeVariant(850, 420, 420, 70)
MINIMUM = PerCodeVariant(12, 8, 8, 1.15)
#: The gather load of MVE takes a cycle per lane (Cortex-M55 Software Optimization Guide). These cycles are counted as
#: instructions.
TABLE = PerCodeVariant(9, 6, 6, 1.3)
#: The MVE code of softmax does not compile with GCC 12.2. The number for MVE is assumed: about a fourth of the number
#: for scalar code, because MVE code computes four lanes at once.
SOFTMAX = PerCodeVariant(1950, 520, 522, 140)

# -- pooling: per result, per tap of a result, per pixel, per tap of a pixel
MAXIMUM_POOL = (
    PerCodeVariant(-10, 4.2, 4.2, 0.1),
    PerCodeVariant(40.6, 7.5, 7.5, 1.08),
    PerCodeVariant(130, 66, 66, 46),
    PerCodeVariant(30, 21, 21, 15.4),
)
AVERAGE_POOL = (
    PerCodeVariant(154, 66, 13, 11),
    PerCodeVariant(18.7, 11.2, 6, 1.1),
    PerCodeVariant(115, 23, 77, 50),
    PerCodeVariant(0, 0, 16, 0),
)

# -- data movement: per element, and per run of elements that stay adjacent
TRANSPOSE = PerCodeVariant(7.8, 5.7, 5.7, 4.8)
TRANSPOSE_MATRIX = PerCodeVariant(6.2, 5.1, 5.1, 1.9)
COPY = PerCodeVariant(0.85, 0.56, 0.56, 0.2)
COPY_RUN = PerCodeVariant(55, 31, 31, 33.5)
PAD_ROW = PerCodeVariant(120, 90, 90, 25)

# -- quantize and dequantize: per element
QUANTIZE_WITH_FPU, QUANTIZE_WITHOUT_FPU = PerCodeVariant(40, 40, 40, 2), PerCodeVariant(257, 142, 142, 142)
DEQUANTIZE_WITH_FPU, DEQUANTIZE_WITHOUT_FPU = PerCodeVariant(8, 8, 8, 1.5), PerCodeVariant(172, 64, 64, 64)

# -- ExecuTorch's portable kernels of other operators: per element of the result
#: Arithmetic of two float32. An addition and a multiplication were measured, with the FPU and as library calls. The
#: part for index arithmetic of the portable kernels is rough.
FLOAT_WITH_FPU, FLOAT_WITHOUT_FPU = 26, PerCodeVariant(233, 113, 113, 113)
#: A function such as the exponential (measured: newlib's ``expf``), and rough index arithmetic.
FUNCTION_WITH_FPU, FUNCTION_WITHOUT_FPU = 100, PerCodeVariant(2400, 1130, 1130, 1130)
#: One MAC of a float convolution or matrix product. Rough: two loads, a multiplication, an addition, index arithmetic.
FLOAT_PRODUCT_WITH_FPU, FLOAT_PRODUCT_WITHOUT_FPU = 10, PerCodeVariant(220, 100, 100, 100)
#: Rough: an element that a portable kernel copies by itself, not in a run of elements (permutation, selection).
PORTABLE_MOVE = 25
#: Rough: one call, with the runtime's dispatch, the checks of the arguments and the preparation of the kernel.
CALL = 1500
