# How ops are compiled and linked.

# Several of these libraries share one process, so none may use another's symbols.
set(TWINOP_CXX_OPTIONS -fPIC -fvisibility=hidden -fvisibility-inlines-hidden -Wall -Wextra)
set(TWINOP_GNU_OPTIONS -fno-gnu-unique)
set(TWINOP_CUDA_OPTIONS -Xcompiler=-fPIC,-fvisibility=hidden,-fvisibility-inlines-hidden,-Wall,-Wextra
                        --expt-relaxed-constexpr --fmad=false)
# Kernels are many instances of few templates. Compression makes them a quarter as large.
set(TWINOP_CUDA_12_8_OPTIONS --compress-mode=size)

# Without -fno-trapping-math, GCC does not vectorise a choice between two results. Without contraction into FMA, a
# result does not depend on the instruction set. The scheduler moves instructions across the registers of a block
# (kernels/elementwise/cpu.h, BlockLoop).
set(TWINOP_KERNEL_OPTIONS $<$<NOT:$<CONFIG:Debug>>:-O3> -ftree-vectorize -fno-trapping-math -ffp-contract=off)
set(TWINOP_KERNEL_GNU_OPTIONS -fschedule-insns -fsched-pressure)

# nodelete: a runtime may unload the library with its last session and load it again for the next one. Each time,
# the ops and the CUDA runtime, which live as long as the process, would be lost.
set(TWINOP_LINK_OPTIONS -Wl,--no-undefined -Wl,-z,nostart-stop-gc -Wl,-z,nodelete)
# Of libraries with the archive: nothing else refers to it. Each library calls its own twinop_library.
set(TWINOP_ARCHIVE_LINK_OPTIONS -Wl,--undefined=RegisterCustomOps -Wl,-Bsymbolic)

