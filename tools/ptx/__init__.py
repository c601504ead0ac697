"""Runs the PTX that Triton makes for Hopper (sm_90) on a CPU, and checks what a GPU would not say.

`python -m tools.ptx OP [CASE]` runs a generated case of an operation. `hook.emulated` lets
`triton_call` run compiled kernels here instead of Triton's interpreter; `launch.run` runs PTX text.
`python -m tools.ptx OP --candidates` runs every configuration of the tuner on longer calls.

Checked: results, bounds and alignment of global and shared memory, writes to inputs, and races
between the warps of a program through shared memory. Copies (`cp.async`) and products (`wgmma`)
run as late as the code allows, and nothing may touch their memory before the code waits for them.
Not covered: fp8 products, TMA but for loads of two axes, clusters, warps that diverge by more than
skipping a part, races between the lanes of one warp or through global memory, and time.
"""
