"""Integer fusion: which operators are computed as one in integers.

``rules`` has the conditions. ``plan`` applies them to a graph before quantization; the annotator gives no quantization
parameters to the results that its ``FusionPlan`` fuses. The quantized program carries the plan in the places of its
quantize and dequantize operators, also if another quantizer wrote them. The lowering reads these places with the same
rules: ``rules.find_merged_consumers`` finds what merges into a RESCALE, ``univariate.fuse_into_function`` composes the
functions of one tensor that become one TABLE.
"""
