r"""How byte-level vocabularies split text into words before merging, by the name in a GGUF file.

The patterns are facts of the vocabularies: merges were learned on words cut this way, and any other
cut gives other ids. Each pattern isolates its matches; what lies between them goes to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from tokenmill.errors import CheckpointError, did_you_mean

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BREAKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS}|{_BREAKS}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SYMBOLS}|{_BREAKS}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BREAKS}"
)
_SEED_CODER = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BREAKS}"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)

# Words by case: a run of capitals (or caseless letters), then a run of small ones.
_HIGH = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOW = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_SYMBOLS_OR_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = (
    rf"{_FIRST}[{_HIGH}]*[{_LOW}]+|{_FIRST}[{_HIGH}]+[{_LOW}]*"
    rf"|\p{{N}}|{_SYMBOLS_OR_SLASH}|{_BREAKS}"
)
_GPT4O = (
    rf"{_FIRST}[{_HIGH}]*[{_LOW}]+{_CONTRACTIONS}?|{_FIRST}[{_HIGH}]+[{_LOW}]*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_SYMBOLS_OR_SLASH}|{_BREAKS}"
)

_CJK_AND_HANGUL = "[一-龥ࠀ-一가-\ud7ff]+"
_CASED = (
    "[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅ"
    "Ὀ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤ"
    "Ⳬ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?{_CASED}",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    _CJK_AND_HANGUL,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_AND_HANGUL, _DIGIT)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """What a pre-tokenizer name in a GGUF file stands for."""

    patterns: tuple[str, ...]
    """Regular expressions (Oniguruma), applied one after the other."""
    composes: bool = False
    """Whether text is brought into NFC first, which the file itself does not say."""
    ignores_merges: bool = False
    """Whether a word that is a token as a whole is taken without merging."""
    adds_bos: bool = False
    """Whether texts begin with BOS if the file does not say."""


_TABLE: dict[tuple[str, ...], PreTokenization] = {
    (
        "default", "gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en",
        "jina-v2-code", "roberta-bpe", "gigachat", "a.x-4.0", "mellum", "modern-bert", "exaone4",
        "jais", "trillion", "granite-docling",
    ): PreTokenization((_GPT2,)),
    ("mpt", "olmo"): PreTokenization((_GPT2,), composes=True),
    (
        "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b",
        "mellum2",
    ): PreTokenization((_DIGIT, _GPT2)),
    (
        "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
        "jina-v5-nano",
    ): PreTokenization((_LLAMA3,), ignores_merges=True, adds_bos=True),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): PreTokenization((_LLAMA3,)),
    ("qwen2",): PreTokenization((_QWEN2,), composes=True),
    (
        "stablelm2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "hunyuan", "grok-2",
        "solar-open",
    ): PreTokenization((_QWEN2,)),
    ("qwen35",): PreTokenization((_QWEN35,), composes=True),
    ("tekken",): PreTokenization((_TEKKEN,), ignores_merges=True, adds_bos=True),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): PreTokenization((_GPT4O,)),
    ("deepseek-llm",): PreTokenization(_DEEPSEEK_LLM),
    ("deepseek-coder",): PreTokenization(_DEEPSEEK_CODER),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm"): PreTokenization(_DEEPSEEK3),
    ("falcon",): PreTokenization(_FALCON),
    ("bloom", "poro-chat", "gpt3-finnish"): PreTokenization((_BLOOM,)),
    ("viking",): PreTokenization((_BLOOM, _DIGIT)),
    ("seed-coder",): PreTokenization((_SEED_CODER,)),
    ("bailingmoe", "bailingmoe2", "llada-moe"): PreTokenization((_BAILING,)),
}  # fmt: skip

PRE_TOKENIZATIONS = {name: kind for names, kind in _TABLE.items() for name in names}


def pre_tokenization(name: str) -> PreTokenization:
    """The kind of this name. Raises `CheckpointError` if nobody knows it: a wrong cut would give
    wrong ids without a sign.
    """
    if name not in PRE_TOKENIZATIONS:
        hint = did_you_mean(name, PRE_TOKENIZATIONS)
        raise CheckpointError(
            f"tokenizer.ggml.pre is {name!r}, which is not known.{hint}"
            f" Name the original tokenizer with `tokenizer=` (--tokenizer)."
            f" Known: {', '.join(sorted(PRE_TOKENIZATIONS))}."
        )
    return PRE_TOKENIZATIONS[name]


def build_pre_tokenizer(kind: PreTokenization) -> pre_tokenizers.PreTokenizer:
    """Split by each pattern, then spell the words' bytes."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
