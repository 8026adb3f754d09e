"""The README shows what docs/results says."""

import pytest

from scripts import update_readme


def test_readme_shows_the_committed_results():
    assert update_readme.main(["--check"]) == 0


def test_a_table_without_a_place_is_an_error():
    with pytest.raises(ValueError, match="one place for the table comm, got 0"):
        update_readme.filled("nothing here")


def test_an_old_table_is_found_and_replaced():
    text = (update_readme.ROOT / "README.md").read_text(encoding="utf-8")
    old = text.replace("| adams_bf16 |", "| adams_bf16 | 1")
    assert old != text and update_readme.filled(old) == text
