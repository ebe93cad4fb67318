# SPDX-License-Identifier: Apache-2.0
#
# Include it before ExecuTorch is added: its selective build then has the portable kernels of this program and no
# others. Made by arm_recipes; made again with each export.
@SELECTED@
@OTHERS@
