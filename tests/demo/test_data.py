"""The demo's text and its batches."""

import numpy as np
import pytest

from jaxmoe.demo import data


def test_stdlib_text_is_the_same_every_time():
    a, name = data.load_text()
    b, _ = data.load_text()
    np.testing.assert_array_equal(a, b)
    assert a.dtype == np.uint8
    assert 100_000 < a.size <= 2**21
    assert "standard library" in name
    assert b"import " in a.tobytes()


def test_folder_is_read_in_the_order_of_names(tmp_path):
    for name in ("b.py", "a.py", "c.txt"):
        (tmp_path / name).write_text(name)
    text, _ = data.load_text(tmp_path)
    assert text.tobytes() == b"a.pyb.py"


def test_file(tmp_path):
    (tmp_path / "verse.txt").write_text("tiger, tiger")
    text, name = data.load_text(tmp_path / "verse.txt")
    assert text.tobytes() == b"tiger, tiger"
    assert "verse.txt" in name


def test_no_sources_says_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "stdlib_folder", lambda: tmp_path)
    with pytest.raises(ValueError, match=r"found 0 in 0 \*\.py files.*Pass --text"):
        data.load_text()
    with pytest.raises(ValueError, match="does not exist"):
        data.load_text(tmp_path / "missing")
    (tmp_path / "short.py").write_text("x = 1")
    with pytest.raises(ValueError, match="at least 65 bytes.*found 5"):
        data.load_text(tmp_path, min_bytes=65)


def test_batches_depend_on_seed_and_step_alone():
    text, _ = data.load_text()

    def draw(seed, step):
        return data.draw_batch(text, batch=4, seq=16, seed=seed, step=step)

    first = draw(0, 0)
    assert first.shape == (4, 17)
    assert first.dtype == np.int32
    np.testing.assert_array_equal(first, draw(0, 0))
    assert (first != draw(0, 1)).any()
    assert (first != draw(1, 0)).any()


def test_windows_are_contiguous_and_reach_the_last_byte():
    text = np.arange(10, dtype=np.uint8)
    drawn = np.concatenate([data.draw_batch(text, batch=8, seq=3, seed=0, step=s) for s in range(8)])
    assert (np.diff(drawn, axis=1) == 1).all()
    assert drawn.min() == 0
    assert drawn.max() == 9
