"""The byte tokenizer: round trips, broken text, ids of another tokenizer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.tokenizer import ByteTokenizer, Tokenizer, get_tokenizer

TOKENIZER = ByteTokenizer()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_decode_inverts_encode(text):
    ids = TOKENIZER.encode(text)
    assert ids.max(initial=0) < 256
    assert TOKENIZER.decode(ids) == text


@given(st.text(st.characters()))
def test_any_text_encodes(text):
    """Also text with surrogates, which has no UTF-8 form of its own."""
    decoded = TOKENIZER.decode(TOKENIZER.encode(text))
    assert TOKENIZER.decode(TOKENIZER.encode(decoded)) == decoded


def test_ids_are_the_utf8_bytes():
    ids = TOKENIZER.encode("aé€")
    assert ids.tolist() == [0x61, 0xC3, 0xA9, 0xE2, 0x82, 0xAC]
    assert ids.dtype == np.uint16
    assert (TOKENIZER.name, TOKENIZER.vocab_size, TOKENIZER.end_of_text) == ("byte", 257, 256)


def test_a_lone_surrogate_becomes_the_replacement_character():
    assert TOKENIZER.decode(TOKENIZER.encode("a\udbc0b")) == "a\ufffdb"


def test_a_pair_of_surrogates_becomes_its_character():
    assert TOKENIZER.decode(TOKENIZER.encode("\ud83d\ude00\udc00")) == "\U0001f600\ufffd"


def test_broken_bytes_decode_to_the_replacement_character():
    assert TOKENIZER.decode([0x61, 0xFF, 0x62]) == "a\ufffdb"


def test_end_of_text_separates_documents():
    ids = [*TOKENIZER.encode("ab"), 256, *TOKENIZER.encode("c"), 256]
    assert TOKENIZER.decode(ids) == "abc"
    assert TOKENIZER.decode(ids, end_of_text="|") == "ab|c|"
    assert TOKENIZER.decode([256], end_of_text="|") == "|"


def test_bytes_on_two_sides_of_an_end_of_text_are_not_joined():
    first, second = "é".encode()
    assert TOKENIZER.decode([first, 256, second]) == "\ufffd\ufffd"


def test_nothing_decodes_to_nothing():
    assert TOKENIZER.decode([]) == ""
    assert TOKENIZER.decode(TOKENIZER.encode("")) == ""


@pytest.mark.parametrize("wrong", [257, 70000, -1])
def test_an_id_of_another_tokenizer_is_an_error(wrong):
    with pytest.raises(ValueError, match=rf"\[0, 256\], got {wrong} at position 2"):
        TOKENIZER.decode([1, 2, wrong, 4])


@pytest.mark.parametrize("ids", [[[1, 2], [3, 4]], [1.5]])
def test_decode_takes_one_sequence_of_integers(ids):
    with pytest.raises(ValueError, match="1-D array of integers"):
        TOKENIZER.decode(ids)


def test_built_in_tokenizers_by_name():
    assert get_tokenizer("byte") == TOKENIZER
    assert isinstance(TOKENIZER, Tokenizer)
    with pytest.raises(ValueError, match=r"one of \['byte'\], got 'bite'"):
        get_tokenizer("bite")
