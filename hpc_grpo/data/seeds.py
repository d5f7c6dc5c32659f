"""The two places where a run's data gets its randomness: the shuffle of an epoch and the seed of a sample.

Both are pure functions of numbers that a checkpoint holds: a resumed run sees what the killed one would have seen.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def epoch_permutation(num_items: int, seed: int, epoch: int, stream: int = 0) -> NDArray[np.int64]:
    """Shuffle the items for one epoch: entry `i` is the item at the epoch's place `i`. Streams are independent.

    PCG64 and SeedSequence give the same stream on every platform. NumPy may change `permutation` itself
    between feature releases (NEP 19), so a golden test pins the values this package was released with.
    """
    import numpy as np

    # SeedSequence fills up with zeros, so stream 0 is what [seed, epoch] gives.
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch, stream])))
    return generator.permutation(num_items)


def sampling_seed(run_seed: int, ordinal: int, sample_index: int, policy_version: int) -> int:
    """Derive the seed of one completion, in [0, 2**31): engines that take signed 32-bit seeds accept it too.

    A hash and not a sum, so that neighbouring ordinals and samples share no seeds. Python's `hash` would do
    it differently in every process.

    >>> sampling_seed(0, 0, 0, 0) == sampling_seed(0, 0, 0, 0) != sampling_seed(0, 0, 1, 0)
    True
    """
    key = f"{run_seed}:{ordinal}:{sample_index}:{policy_version}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1
