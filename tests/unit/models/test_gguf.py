"""GGUF files: the very weights and the right tokens, and a clear word where a file is not what it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import normalizers
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from specdec import Engine
from specdec.errors import CheckpointError, ConfigError, SpecdecError, SpecdecWarning
from specdec.models.gguf import GgufFile
from specdec.models.gguf_splits import splitter
from specdec.models.live_model import load_model
from specdec.models.tokenizer import load_tokenizer
from tests.gguf_files import BOS, EOS, PIECES, TOKENS, new_llama, write_gguf, write_pieces


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", new_llama())


def load(file: Path, dtype: str = "auto") -> Any:
    return load_model(file, dtype=dtype, device=None, device_map=None, trust_remote_code=False)


@pytest.mark.parametrize(("dtype", "loaded"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_weights_are_those_of_the_file(file: Path, dtype: str, loaded: torch.dtype) -> None:
    model, own = load(file, dtype), new_llama().state_dict()
    assert {name: weight.dtype for name, weight in model.state_dict().items()} == dict.fromkeys(own, loaded)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight.float(), own[name]), name
    assert model.generation_config.eos_token_id == EOS
    assert getattr(model.config, "quantization_config", None) is None


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q5_1"])
def test_quantised_weights_are_held_in_bfloat16(tmp_path: Path, kind: str) -> None:
    """Those of a file; transformers itself knows no Q5, the package gguf does."""
    import gguf

    blocks, stored = gguf.GGMLQuantizationType[kind], dict[str, Any]()

    def pack(writer: Any) -> None:
        add = writer.add_tensor

        def packed(name: str, values: Any) -> None:
            if values.ndim == 1:
                return add(name, values)
            stored[name] = gguf.quants.quantize(values, blocks)
            return add(name, stored[name], raw_dtype=blocks)

        writer.add_tensor = packed

    file = write_gguf(tmp_path / "small.gguf", new_llama(), change=pack)
    assert GgufFile.read(file).dtype == torch.bfloat16
    model = load(file)
    assert model.name_or_path == str(file)
    weight = torch.from_numpy(gguf.quants.dequantize(stored["blk.0.ffn_up.weight"], blocks))
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, weight.bfloat16())
    assert torch.equal(load(file, "float32").model.layers[0].mlp.up_proj.weight, weight)
    assert load_tokenizer(file).tokenize("\n\n12") == ["ĊĊ", "1", "2"]
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"cut\.gguf'.*get it again"):
        load(cut)


def test_an_engine_of_a_file_says_what_the_model_says(file: Path) -> None:
    engine = Engine.from_pretrained(file, dtype="float64")
    model: Any = new_llama().double()
    prompt = torch.tensor([[BOS, 5, 9]])
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    assert engine.generate(prompt, 8).token_ids == expected[0, 3:].tolist()
    assert Engine.from_pretrained(str(file), dtype="float64").encode("\n\n1") == engine.encode("\n\n1")


@pytest.mark.parametrize(("split", "tokens"), [("smollm", ["ĊĊ", "1", "2"]), ("gpt-2", ["Ċ", "Ċ", "12"])])
def test_texts_are_split_as_the_file_says(tmp_path: Path, split: str, tokens: list[str]) -> None:
    """With digits alone, line breaks before one are a piece of their own, and merge."""
    tokenizer = load_tokenizer(write_gguf(tmp_path / "small.gguf", new_llama(), split=split))
    assert tokenizer.tokenize("\n\n12") == tokens
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], return_dict=True)
    assert list(asked["input_ids"]) == [BOS, TOKENS.index("a"), EOS]


@pytest.mark.parametrize(
    ("split", "flag", "begins"),
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("tekken", None, True),
        ("falcon3", None, True),
        ("smollm", None, False),
        ("smollm", True, True),
        ("qwen2", None, False),
        ("gpt-2", None, False),
    ],
)
def test_a_text_begins_as_llama_cpp_has_it_begin(tmp_path: Path, split: str, flag: bool | None, begins: bool) -> None:
    """By the rule that splits texts, where the file has no flag."""
    change = (lambda writer: None) if flag is None else (lambda writer: writer.add_add_bos_token(flag))
    tokenizer = load_tokenizer(write_gguf(tmp_path / "small.gguf", new_llama(), split=split, change=change))
    assert tokenizer("ab")["input_ids"] == [BOS] * begins + [TOKENS.index("a"), TOKENS.index("b")]
    assert tokenizer("ab", add_special_tokens=False)["input_ids"] == [TOKENS.index("a"), TOKENS.index("b")]
    tokenizer.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved")("ab")["input_ids"] == tokenizer("ab")["input_ids"]


def test_a_text_ends_as_the_file_says(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "small.gguf", new_llama(), change=lambda writer: writer.add_add_eos_token(True))
    assert load_tokenizer(file)("a")["input_ids"] == [TOKENS.index("a"), EOS]


@pytest.mark.parametrize(("split", "whole"), [("llama-bpe", True), ("tekken", True), ("gpt-2", False)])
def test_words_that_are_tokens_need_no_merges(tmp_path: Path, split: str, whole: bool) -> None:
    """Under Llama 3's rule and Mistral's; no merge leads to some of their tokens."""
    file = write_gguf(tmp_path / "small.gguf", new_llama(), split=split, merges=["1 2"])
    assert load_tokenizer(file).tokenize("\n\n") == (["ĊĊ"] if whole else ["Ċ", "Ċ"])


_PIECES = (  # settings, and what becomes of "ab", " ab", "<s>ab"
    ({}, ["<s>", "▁ab"], ["<s>", "▁", "▁ab"], ["<s>", "<s>", "▁ab"]),
    ({"add_space_prefix": True}, ["<s>", "▁ab"], ["<s>", "▁", "▁ab"], ["<s>", "<s>", "▁ab"]),
    ({"add_space_prefix": False}, ["<s>", "ab"], ["<s>", "▁ab"], ["<s>", "<s>", "ab"]),
    ({"add_bos_token": False}, ["▁ab"], ["▁", "▁ab"], ["<s>", "▁ab"]),
    ({"add_eos_token": True}, ["<s>", "▁ab", "</s>"], ["<s>", "▁", "▁ab", "</s>"], ["<s>", "<s>", "▁ab", "</s>"]),
)


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
@pytest.mark.parametrize(("settings", "first", "second", "third"), _PIECES)
def test_settings_of_pieces(
    tmp_path: Path, architecture: str, settings: dict[str, bool], first: list[str], second: list[str], third: list[str]
) -> None:
    """A space stands before a text, and before what follows a special token, unless the file says that none does."""
    tokenizer = load_tokenizer(write_pieces(tmp_path / "small.gguf", architecture=architecture, settings=settings))
    found = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in ("ab", " ab", "<s>ab")]
    assert found == [first, second, third]
    for text in ("ab", " ab", "a  b é\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_pieces_of_gemma_have_no_space_before_them(tmp_path: Path) -> None:
    """Its first files do not say so."""
    tokenizer = load_tokenizer(write_pieces(tmp_path / "small.gguf", architecture="gemma2"))
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab")["input_ids"]) == ["<s>", "ab"]


def test_pieces_begin_and_end_with_tokens_that_need_not_be_named(tmp_path: Path) -> None:
    file = write_pieces(tmp_path / "small.gguf", settings={"add_eos_token": True}, ends=False)
    assert load_tokenizer(file)("a")["input_ids"] == [1, PIECES.index("▁a"), 2]


def test_a_begin_token_that_is_not_named_is_missed_aloud(tmp_path: Path) -> None:
    change = _rewritten(bos_token_id=None)
    file = write_gguf(tmp_path / "small.gguf", new_llama(), split="llama-bpe", change=change)
    with pytest.warns(SpecdecWarning, match="asks for a BOS token around each text and does not say which"):
        assert load_tokenizer(file)("a")["input_ids"] == [TOKENS.index("a")]


_SPLITS = (  # as llama.cpp splits "I'LL x==12345, \u00e9.\n\n\n  (", without the spelling of bytes
    ("gpt-2", ["I", "'", "LL", "_x", "==", "12345", ",", "_\u00e9", ".", "///_", "_("]),
    ("smollm", ["I", "'", "LL", "_x", "==", "1", "2", "3", "4", "5", ",", "_\u00e9", ".", "///_", "_("]),
    ("qwen2", ["I", "'LL", "_x", "==", "1", "2", "3", "4", "5", ",", "_\u00e9", ".///", "_", "_("]),
    ("stablelm2", ["I", "'LL", "_x", "==", "1", "2", "3", "4", "5", ",", "_\u00e9", ".///", "_", "_("]),
    ("llama-bpe", ["I", "'LL", "_x", "==", "123", "45", ",", "_\u00e9", ".///", "_", "_("]),
    ("chatglm-bpe", ["I", "'LL", "_x", "==", "123", "45", ",", "_\u00e9", ".///", "_", "_("]),
    ("default", ["I", "'", "LL", "_x", "==", "123", "45", ",", "_\u00e9", ".", "///__", "("]),
    ("falcon", ["I", "'", "LL", "_x", "==", "123", "45", ",", "_\u00e9", ".", "///__", "("]),
    ("deepseek-coder", ["I", "'", "LL", "_x", "==", *"12345", ",", "_\u00e9", ".", "/", "/", "/", "_", "_("]),
    ("deepseek-v3", ["I", "'LL", "_x", "==", "123", "45", ",", "_\u00e9", ".///", "_", "_("]),
    ("bloom", ["I'LL", "_x==12345", ",", "_\u00e9", ".///__("]),
    ("seed-coder", ["I", "'LL", "_x", "==", "1", "2", "3", "4", "5", ",", "_\u00e9", ".", "///", "_", "_("]),
    ("bailingmoe", ["I", "'LL", "_x", "==", "1", "2", "3", "4", "5", ",", "_\u00e9", ".///", "_", "_("]),
)


@pytest.mark.parametrize(("rule", "pieces"), _SPLITS)
def test_rules_split_texts(rule: str, pieces: list[str]) -> None:
    found = splitter(rule).pre_tokenize_str("I'LL x==12345, \u00e9.\n\n\n  (")
    spelled = str.maketrans({"_": "\u0120", "/": "\u010a", "\u00e9": "\u00c3\u00a9"})
    assert [piece for piece, _ in found] == [piece.translate(spelled) for piece in pieces]


def _rewritten(**values: Any) -> Any:
    """What puts other values in the place of some that a writer has, or takes those away that are None here."""

    def change(writer: Any) -> None:
        for name, value in values.items():
            entry = writer.kv_data[0].pop(f"tokenizer.ggml.{name}")
            if value is not None:
                entry.value = value
                writer.kv_data[0][f"tokenizer.ggml.{name}"] = entry

    return change


def test_pieces_with_merges(tmp_path: Path) -> None:
    """Gemma 4's: spelled as SentencePiece's, and merged by a list."""
    change = _rewritten(model="gemma4", tokens=["\u2581", *TOKENS[1:]], merges=["1 2"])
    tokenizer = load_tokenizer(write_gguf(tmp_path / "small.gguf", new_llama(), merges=["1 2"], change=change))
    ids = tokenizer("12 a")["input_ids"]
    assert ids == [BOS, TOKENS.index("12"), 0, TOKENS.index("a")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "12 a"


def test_tokens_that_stand_in_a_text_as_a_whole(tmp_path: Path) -> None:
    """Also those that GPT-2's bytes do not spell (DeepSeek's); and none is found that the file does not have."""
    control, spaces = "\uff5cU\u2581x\uff5c", "  "
    change = _rewritten(tokens=[control, spaces, *TOKENS[2:]], token_type=[3, 4, *[1] * (len(TOKENS) - 4), 3, 3])
    tokenizer = load_tokenizer(write_gguf(tmp_path / "small.gguf", new_llama(), split="gpt-2", change=change))
    ids = tokenizer(f"a{control}b{spaces}<s><|endoftext|>")["input_ids"]
    assert ids == [TOKENS.index("a"), 0, TOKENS.index("b"), 1, BOS, *map(TOKENS.index, "<|endoftext|>")]
    assert tokenizer.decode(ids[:5], skip_special_tokens=True) == f"ab{spaces}"
    assert len(tokenizer) == len(TOKENS)


def test_special_tokens_of_phi_3_take_the_space_behind_them(tmp_path: Path) -> None:
    """Those of files with its name, as no setting says so."""
    found = {}
    for name in ("Phi-3 mini", "other"):
        file = write_pieces(tmp_path / "small.gguf", settings={"add_bos_token": False}, name=name)
        tokenizer = load_tokenizer(file)
        found[name] = tokenizer.convert_ids_to_tokens(tokenizer("<s> a</s> \n a")["input_ids"])
    assert found["Phi-3 mini"] == ["<s>", "\u2581", "\u2581a", "</s>", "\u2581a"]
    assert found["other"] == ["<s>", "\u2581", "\u2581a", "</s>", "\u2581", "\u2581", "<0x0A>", "\u2581a"]


def test_ends_are_those_that_the_file_names(tmp_path: Path) -> None:
    def ends(writer: Any) -> None:
        writer.add_eot_token_id(3)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 5)

    file = write_gguf(tmp_path / "small.gguf", new_llama(), change=ends)
    assert load(file).generation_config.eos_token_id == [3, 5, EOS]


_REFUSED = (
    ({"pre": "sundry"}, r"splits texts by the rule 'sundry', which is not known here"),
    ({"pre": "deepseek-llm"}, r"splits texts by the rule 'deepseek-llm'"),
    ({"model": "bert"}, r"is of the kind 'bert', and llama, gpt2, gemma4 are read here"),
    ({"model": "t5"}, r"is of the kind 't5'"),
    ({"model": "rwkv"}, r"is of the kind 'rwkv'"),
    ({"model": "llama"}, r"its tokens have no scores"),
    ({"merges": None}, r"its tokens have no merges"),
    ({"tokens": [*TOKENS[:-3], TOKENS[0], *TOKENS[-2:]]}, r"it lists a token twice"),
    ({"eos_token_id": len(TOKENS)}, rf"it names token {len(TOKENS)} and has {len(TOKENS)}"),
)


@pytest.mark.few(2)
@pytest.mark.parametrize(("values", "message"), _REFUSED)
def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    """By name, with what to do; another tokenizer may be given."""
    file = write_gguf(tmp_path / "small.gguf", new_llama(), change=_rewritten(**values))
    with pytest.raises(
        CheckpointError, match=rf"tokenizer of small\.gguf cannot be read faithfully: .*{message}.*; give"
    ):
        load_tokenizer(file)
    own = write_gguf(tmp_path / "own.gguf", new_llama())
    load_tokenizer(own).save_pretrained(tmp_path / "own")
    given = load_tokenizer(tmp_path / "own")
    assert Engine.from_pretrained(file, tokenizer=given).tokenizer is given


@pytest.mark.parametrize("reader", ["post_processor", "normalizer"])
def test_a_reading_that_keeps_to_no_setting_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    """The tokens of texts are held against the file's lists and settings, whatever the libraries make of them."""
    file = write_pieces(tmp_path / "small.gguf")
    if reader == "post_processor":
        monkeypatch.setattr(TokenizersBackend, "update_post_processor", lambda self: None)
    else:
        monkeypatch.setattr("tokenizers.normalizers.Prepend", lambda space: normalizers.Sequence([]))
    with pytest.raises(
        CheckpointError, match=r"small\.gguf cannot be read.*becomes the tokens \[.*own settings make it"
    ):
        load_tokenizer(file)


def test_pieces_of_one_score_are_refused(tmp_path: Path) -> None:
    """Of those llama.cpp takes the leftmost, and a list of merges has an order."""
    file = write_pieces(tmp_path / "small.gguf", tied=[*"Helo", "ll", "el"])
    with pytest.raises(CheckpointError, match=r"'Hello world' becomes the tokens"):
        load_tokenizer(file)


def test_a_file_is_known_by_its_first_bytes_and_in_a_folder(file: Path, tmp_path: Path) -> None:
    blob, folder = tmp_path / "sha256-6c1a", tmp_path / "own"
    folder.mkdir()
    for place in (blob, folder / "a.gguf"):
        place.write_bytes(file.read_bytes())
    expected = Engine.from_pretrained(file).generate("\n\n1", 4).token_ids
    for place in (blob, folder):
        assert Engine.from_pretrained(place).generate("\n\n1", 4).token_ids == expected
    (folder / "b.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"own' holds 2 models in GGUF, a\.gguf, b\.gguf; give one of these"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 3, 20, 3000, -1])
def test_a_file_cut_short(file: Path, tmp_path: Path, keep: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"cut\.gguf'.*it is broken or was not fetched whole; get it again"):
        Engine.from_pretrained(cut)


def test_a_file_of_something_else(tmp_path: Path) -> None:
    other = tmp_path / "page.gguf"
    other.write_text("<html>" * 1000)
    with pytest.raises(CheckpointError, match="does not start with the GGUF magic bytes"):
        load(other)
    with pytest.raises(CheckpointError, match=r"cannot load a model from 'no\.gguf': there is no such file"):
        Engine.from_pretrained("no.gguf")


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("rwkv6", r"architecture 'rwkv6' of '.*' is not read from GGUF here, llama, .* are; load the model's folder"),
        ("jamba", r"architecture 'jamba' of '.*' is not read from GGUF"),
        ("nomic-bert", "makes embeddings and no text; give a language model"),
        ("gemma-embedding", "makes embeddings and no text"),
        ("eagle3", "is a draft head and no model: give the model"),
    ],
)
def test_an_architecture_that_cannot_be_driven(tmp_path: Path, architecture: str, message: str) -> None:
    with pytest.raises(SpecdecError, match=message):
        load(write_gguf(tmp_path / "other.gguf", new_llama(), architecture=architecture))


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    model = new_llama()
    model.resize_token_embeddings(100)
    model.save_pretrained(tmp_path)
    load_tokenizer("tiny").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"has 4096 tokens, and LlamaForCausalLM knows 100: it is another"):
        Engine.from_pretrained(tmp_path)


def test_without_the_package(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.models.gguf.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"read by the package gguf, which is not installed: pip install '\.\[gguf\]'"
    ):
        load(file)
