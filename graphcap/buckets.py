"""The ladder: the batch sizes for which a step is recorded."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Iterator

from graphcap.errors import LadderError
from graphcap.explain import warn
from graphcap.plan_file import is_plan, read_plan

logger = logging.getLogger(__name__)


class BucketLadder:
    """Sorted, unique bucket sizes that always contain the exact maximum batch.

    A batch of n runs in the smallest bucket that is >= n. The choice depends on n and the ladder
    alone, so ranks that were given the same ladder and the same n agree.
    """

    __slots__ = ("_sizes",)

    def __init__(self, sizes: Iterable[int], max_batch: int | None = None) -> None:
        """Sort `sizes`, drop repeats and what is above `max_batch`, and add `max_batch` itself.

        Raises:
            LadderError: no size at all, or a size that is not a positive integer (named).
        """
        checked = [_positive(size, "bucket size") for size in sizes]
        if max_batch is not None:
            limit = _positive(max_batch, "maximum batch")
            checked = [size for size in checked if size <= limit] + [limit]
        if not checked:
            raise LadderError(
                "a ladder needs at least one bucket size, found none; give sizes such as 1,2,4,8"
            )
        self._sizes = tuple(sorted(set(checked)))

    @classmethod
    def up_to(cls, max_batch: int) -> BucketLadder:
        """The default ladder: 1, 2, 4, then steps of 8 below 256, of 16 below 512, and so on.

        The step doubles with each octave from 256 on, so the relative padding stays under an eighth
        and a ladder for 512 sequences has 51 buckets, not 512. (Up to 512 these are the capture
        sizes that vLLM uses.)
        """
        limit = _positive(max_batch, "maximum batch")
        sizes = [size for size in (1, 2, 4) if size <= limit]
        size, step = 8, 8
        while size <= limit:
            sizes.append(size)
            if size >= 32 * step:
                step *= 2
            size += step
        return cls(sizes, limit)

    @classmethod
    def parse(cls, text: str, max_batch: int) -> BucketLadder:
        """The ladder that a user wrote: ``auto``, sizes separated by commas (``1,2,4,8,64``), or
        ``plan:FILE``, what ``graphcap plan --json`` printed.

        Of a plan for another maximum, sizes above `max_batch` are left out; a plan that ends below it
        is warned of, for its largest bucket then serves batches that it was not planned for.

        Raises:
            LadderError: an entry is not a positive integer, or the file is no plan; names it.
        """
        if text.strip().lower() == "auto":
            return cls.up_to(max_batch)
        if is_plan(text):
            planned = read_plan(text)
            if planned[-1] < max_batch:
                warn(
                    logger,
                    "ladder",
                    "%s ends at %d and the maximum batch is %d, which was added: batches of %d to %d "
                    "all run in bucket %d; plan again with --max-batch %d, or limit the batch to %d",
                    *(text.strip(), planned[-1], max_batch, planned[-1] + 1, max_batch),
                    *(max_batch, max_batch, planned[-1]),
                )
            return cls(planned, max_batch)
        sizes = []
        for entry in text.split(","):
            word = entry.strip()
            # Python refuses to convert very long numbers, and no batch has 19 digits.
            if not word.isascii() or not word.isdigit() or len(word) > 18 or int(word) == 0:
                raise LadderError(
                    f"bucket sizes: expected 'auto', positive integers such as 1,2,4,8,64, or plan:FILE; "
                    f"found {word!r} in {text!r}; remove or correct that entry"
                )
            sizes.append(int(word))
        return cls(sizes, max_batch)

    @property
    def max_batch(self) -> int:
        return self._sizes[-1]

    def bucket_for(self, batch: int) -> int | None:
        """The smallest bucket >= `batch` rows, or None if `batch` is above the maximum.

        Raises:
            LadderError: `batch` is not a positive integer.
        """
        index = bisect_left(self._sizes, _positive(batch, "batch"))
        return self._sizes[index] if index < len(self._sizes) else None

    def __iter__(self) -> Iterator[int]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, size: object) -> bool:
        return size in self._sizes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BucketLadder) and self._sizes == other._sizes

    def __hash__(self) -> int:
        return hash(self._sizes)

    def __repr__(self) -> str:
        return f"BucketLadder({list(self._sizes)})"


def _positive(value: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LadderError(f"{what}: expected an integer of at least 1, found {value!r}")
    return value
