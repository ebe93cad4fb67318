"""Integer fusion: groups of float operators that the quantized program computes as one integer operator.

``rules`` has the conditions for a group. ``plan`` applies them before quantization, so that no quantize operator is
inserted between the operators of a group. The lowering recognizes a group by the absence of these quantize operators,
also in a program that another quantizer has quantized.
``rules.find_fused_consumers`` finds the operators that are fused into a RESCALE. ``univariate.fuse_into_univariate``
composes elementwise functions of one tensor, which become one TABLE.
"""
