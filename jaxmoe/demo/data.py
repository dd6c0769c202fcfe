"""The text of the demo: bytes of Python source, and batches of windows out of them."""

import sysconfig
from pathlib import Path

import numpy as np

# The alphabetically first 2 MiB are about 60 modules: far more than a demo reads (100 steps x 1024 bytes).
_MAX_BYTES = 2**21
# A Python without sources still has a few stray files; under this the model would learn them by heart.
_MIN_STDLIB_BYTES = 2**16


def stdlib_folder() -> Path:
    """Where this Python keeps the sources of its standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def load_text(path: Path | None = None, *, min_bytes: int = 1) -> tuple[np.ndarray, str]:
    """The bytes of a file, or of a folder's own *.py files in the order of their names, up to 2 MiB.

    Args:
      path: a file or a folder; None is the standard library.
      min_bytes: fewer is an error.

    Returns:
      [bytes] uint8, and a few words on what they are.

    Raises:
      ValueError: no such file or folder, or too little text in it; the message says the remedy.

    Example:
      >>> text, name = load_text()
      >>> text.dtype, text.size > 100_000
      (dtype('uint8'), True)
    """
    folder = stdlib_folder() if path is None else path
    if path is None:
        min_bytes = max(min_bytes, _MIN_STDLIB_BYTES)
    elif not folder.exists():
        raise ValueError(f"--text must be a file or a folder; {folder} does not exist. Mend the path, or leave it out")
    files = sorted(folder.glob("*.py")) if folder.is_dir() else [folder] if folder.is_file() else []
    parts: list[bytes] = []
    size = 0
    for file in files:
        if size >= _MAX_BYTES:
            break
        parts.append(file.read_bytes())
        size += len(parts[-1])
    text = np.frombuffer(b"".join(parts)[:_MAX_BYTES], np.uint8)
    if text.size < min_bytes:
        raise ValueError(
            f"the demo learns from at least {min_bytes} bytes of text; found {text.size} in {len(parts)} *.py files of "
            f"{folder}. Pass --text FILE_OR_FOLDER with more of it (any text will do), or use a Python that has its "
            "sources (Debian: apt-get install libpython3-stdlib)"
        )
    what = "Python's standard library" if path is None else str(path)
    return text, f"{text.size / 2**20:.1f} MiB of {what} ({len(parts)} files)"


def draw_batch(text: np.ndarray, *, batch: int, seq: int, seed: int, step: int) -> np.ndarray:
    """Windows of seq + 1 bytes at places that depend on seed and step alone.

    Args:
      text: [bytes] uint8.
      batch: the windows.
      seq: bytes a window predicts.
      seed: of the run.
      step: of the run.

    Returns:
      [batch, seq + 1] int32: inputs are [:, :-1], targets [:, 1:].

    Example:
      >>> draw_batch(np.arange(9, dtype=np.uint8), batch=1, seq=8, seed=0, step=0).tolist()
      [[0, 1, 2, 3, 4, 5, 6, 7, 8]]
    """
    starts = np.random.default_rng((seed, step)).integers(0, text.size - seq, size=batch)
    return text[starts[:, None] + np.arange(seq + 1)].astype(np.int32)
