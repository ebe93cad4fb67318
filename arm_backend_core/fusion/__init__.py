"""Integer fusion: groups of float operators that the quantized program computes as one integer operator.

``rules`` has the conditions. ``plan`` applies them before quantization: no quantize operator is inserted between the
operators of a group. The lowering recognizes a group because these quantize operators are missing. It thus also finds
groups in a program that another quantizer has quantized.
``rules.find_fused_consumers`` finds the operators that are fused into a RESCALE. ``univariate.fuse_into_univariate``
composes elementwise functions of one tensor, which become one TABLE.
"""
