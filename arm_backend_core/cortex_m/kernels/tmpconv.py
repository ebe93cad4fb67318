from __future__ import annotations
import numpy as np, torch, torch.nn.functional as F
from arm_backend_core.cortex_m.arithmetic import clamp_to_int8, requantize
from arm_backend_core.cortex_m.kernels.registry import kernel
A="Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, "
B="int input_offset, int output_offset, Tensor requantize_multipliers, Tensor requantize_shifts, int activation_min, int activation_max, Tensor scratch"
def out(i,k,s,p,d): return (i+2*p-d*(k-1)-1)//s+1
def conv_shape(x,w,b,s,p,d,*r): return (x[0],out(x[1],w[1],s[0],p[0],d[0]),out(x[2],w[2],s[1],p[1],d[1]),w[0])
def dw_shape(x,w,b,s,p,d,*r): return (x[0],out(x[1],w[1],s[0],p[0],d[0]),out(x[2],w[2],s[1],p[1],d[1]),w[3])
def go(x,w,b,s,p,d,groups,io,oo,m,sh,lo,hi):
    t=torch.from_numpy((x.astype(np.float64)+io)).permute(0,3,1,2)
    acc=F.conv2d(t,torch.from_numpy(w.astype(np.float64)),None,s,p,d,groups).permute(0,2,3,1).numpy().astype(np.int64)
    if b is not None: acc=acc+b
    return clamp_to_int8(requantize(acc,m,sh)+oo,lo,hi)
@kernel("quantized_conv2d_nhwc",A+B,result_shape=conv_shape,scratch_bytes=lambda isa,*a:(64,))
def conv(x,w,b,s,p,d,io,oo,m,sh,lo,hi,scr):
    return go(x,w.transpose(0,3,1,2).copy(),b,s,p,d,x.shape[3]//w.shape[3],io,oo,m,sh,lo,hi)
@kernel("quantized_depthwise_conv2d_nhwc",A+"int depth_multiplier, "+B,result_shape=dw_shape,scratch_bytes=lambda isa,*a:(64,))
def dconv(x,w,b,s,p,d,dm,io,oo,m,sh,lo,hi,scr):
    return go(x,w.transpose(3,0,1,2).copy(),b,s,p,d,x.shape[3],io,oo,m,sh,lo,hi)
@kernel("quantized_linear","Tensor input, Tensor weights, Tensor? bias, Tensor? kernel_sum, int input_offset, int filter_offset, int output_offset, int[] requantize_multipliers, int[] requantize_shifts, int activation_max, int activation_min",result_shape=lambda x,w,*r:(*x[:-1],w[0]))
def linear(x,w,b,ks,io,fo,oo,m,sh,hi,lo):
    acc=x.astype(np.int64)@w.astype(np.int64).T
    acc = acc+ks if ks is not None else (acc+io*w.astype(np.int64).sum(1)+(0 if b is None else b))
    return clamp_to_int8(requantize(acc,m[0],sh[0])+oo,lo,hi)
@kernel("quantized_batch_matmul","Tensor lhs, int lhs_zero_point, Tensor rhs_transposed, int rhs_zero_point, int output_zero_point, int output_multiplier, int output_shift, Tensor scratch",result_shape=lambda a,az,b,*r:(a[0],a[1],b[1]),scratch_bytes=lambda isa,*a:(64,))
def bmm(a,az,b,bz,oz,m,s,scr):
    acc=(a.astype(np.int64)+az)@(b.astype(np.int64)+bz).swapaxes(1,2)
    return clamp_to_int8(requantize(acc,m,s)+oz)
