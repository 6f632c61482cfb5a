"""Words of whole tiles, between the language and the kernels. Each can be used alone in a kernel of one's own.

====================  ==============================================================================================
:mod:`.pipeline`      a ring of stages in shared memory, filled by the TMA or by warps, read by others
:mod:`.copies`        tiles that ``cp.async`` brings, 16 bytes a thread; their ring, and a sum over K on it
:mod:`.cache`         keys and values of a cache, side by side or in pages: copied by warps, or boxes for the TMA
:mod:`.product`       a product of tiles, started and waited for: ``wgmma`` or ``mma.sync``
:mod:`.eight_bits`    products whose operand B is fp8, which becomes f16 in registers
:mod:`.scheduler`     which tile next: persistent, longest first, grouped for the L2
:mod:`.shares`        blocks of keys of uneven sequences in equal shares for all CTAs
:mod:`.ragged`        packed sequences, and the list of their tiles
:mod:`.mask`          which scores of a block count, and which blocks are visited at all
:mod:`.softmax`       the online softmax on accumulators; P and dS of a backward pass
:mod:`.merge`         attention over parts of the keys, put together
:mod:`.epilogue`      values of rows and columns; what becomes of a tile of sums, and its ways out
:mod:`.accumulation`  sums that many CTAs add to
:mod:`.planning`      arithmetic that configurations and the host compute without the language
:mod:`.roles`         producer and consumer warpgroups, and their turns at the tensor cores
====================  ==============================================================================================

A tile word is traced away: it costs nothing when the kernel runs.
"""
