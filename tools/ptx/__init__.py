"""Runs the PTX that Triton makes for Hopper (sm_90) on a CPU, and checks what a GPU would not say.

`python -m tools.ptx OP [CASE]` runs a generated case of an operation. `hook.emulated` lets
`triton_call` run compiled kernels here instead of Triton's interpreter; `launch.run` runs PTX text.

Checked: results, bounds and alignment of global and shared memory, writes to inputs, and races
between the warps of a program through shared memory. Copies (`cp.async`) and products (`wgmma`)
run as late as the code allows, and nothing may touch their memory before the code waits for them.
Not covered: TMA, tf32 and fp8 products, clusters, warps that diverge, races between the lanes of
one warp or through global memory, and time.
"""
