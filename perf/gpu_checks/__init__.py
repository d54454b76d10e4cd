"""The checks of perf/gpu_check.py: what only a GPU can show, by what it is about.

    outcome, measure, models, peer     what all checks use
    kernels ipc host learner fsdp whole_run     one GPU
    several vllm                       several GPUs, or vLLM
    table                              all of them, in order

**None of it has run on a GPU.** All of it runs in tests/perf/test_gpu_check.py with the CPU in the
GPU's place, small, and CUDA IPC through a fake driver between real processes: that tests the logic,
not the driver, the kernels or any speed.
"""

from perf.gpu_checks import stand_ins

stand_ins.install()
