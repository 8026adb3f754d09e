"""How the entries of a leaf are cut into rows, and how many of each row are kept. All of it is static."""

import dataclasses

import jax
import jax.numpy as jnp

BLOCK = 4096
MIN_BLOCK, MAX_BLOCK = 32, 32768
# More entries do not fit into the registers of one program.
MAX_KERNEL_BLOCK = 8192
# Flat positions are int32 and must not overflow in a window of rows that ends behind the leaf.
MAX_KERNEL_SIZE = 1 << 30


@dataclasses.dataclass(frozen=True)
class Rows:
    """`size` entries in rows of `block`, k kept in each; the last row may be shorter and keeps k_last.

    Raises:
      ValueError: the block is no power of two in range, or more entries are to be kept than a row has.
    """

    size: int
    block: int = BLOCK
    k: int = 0
    k_last: int | None = None

    def __post_init__(self) -> None:
        check_block(self.block)
        if not 0 <= self.k <= self.block:
            raise ValueError(f"k must be from 0 to the block's {self.block} entries, got {self.k}.")
        if self.k_last is not None and not 0 <= self.k_last <= self.k:
            raise ValueError(f"k_last must be from 0 to k = {self.k}, got {self.k_last}.")

    @property
    def count(self) -> int:
        """R, number of rows."""
        return -(-self.size // self.block)

    @property
    def last(self) -> int:
        """Entries of the last row; 0 without rows."""
        return self.size - max(self.count - 1, 0) * self.block

    @property
    def words(self) -> int:
        """Words of the packed mask."""
        return -(-self.size // 32)

    @property
    def row_words(self) -> int:
        """Words of a full row."""
        return self.block // 32

    @property
    def keeps_last(self) -> int:
        """Entries kept in the last row."""
        return min(self.k, self.last) if self.k_last is None else self.k_last

    @property
    def kept(self) -> int:
        """Entries kept in all rows."""
        return (self.count - 1) * self.k + self.keeps_last if self.count else 0


def check_block(block: int) -> None:
    """Raises ValueError unless `block` is a power of two in range."""
    if not MIN_BLOCK <= block <= MAX_BLOCK or block & (block - 1):
        allowed = ", ".join(str(1 << i) for i in range(MIN_BLOCK.bit_length() - 1, MAX_BLOCK.bit_length()))
        raise ValueError(f"block must be one of {allowed}, got {block}. Leave it out for {BLOCK}.")


def check_words(words: jax.Array, rows: Rows) -> None:
    """Raises ValueError unless `words` is a packed mask of these rows."""
    if words.shape != (rows.words,) or words.dtype != jnp.uint32:
        raise ValueError(
            f"words must be uint32 ({rows.words},), the packed mask of {rows.size} entries, "
            f"got {words.dtype} {words.shape}."
        )


def check_entries(name: str, x: jax.Array, rows: Rows, allowed: tuple[str, ...] = ()) -> None:
    """Raises ValueError unless `x` has an entry for each of these rows' and one of the dtypes (a floating one)."""
    fits = x.dtype.name in allowed if allowed else jnp.issubdtype(x.dtype, jnp.floating)
    if x.size != rows.size or not fits:
        kinds = " or ".join(allowed) or "floating-point"
        raise ValueError(f"{name} must be {kinds} with {rows.size} entries, got {x.dtype} {x.shape}.")


def no_kernel(rows: Rows, *dtypes: jnp.dtype, allowed: tuple[str, ...]) -> str | None:
    """Why no kernel takes these rows and dtypes, or None if one does."""
    if rows.size == 0:
        return "there are no entries"
    if rows.size > MAX_KERNEL_SIZE:
        return f"{rows.size} entries are more than {MAX_KERNEL_SIZE}"
    if rows.block > MAX_KERNEL_BLOCK:
        return f"rows of {rows.block} entries are longer than {MAX_KERNEL_BLOCK}"
    for dtype in dtypes:
        if jnp.dtype(dtype).name not in allowed:
            return f"dtype {jnp.dtype(dtype).name}, not {', '.join(allowed)}"
    return None
