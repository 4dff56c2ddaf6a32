"""The grammar of leaf names, from tables, exhaustively, and against slow references."""

import ast
import enum
import itertools
import re
import time
from collections import namedtuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ajaxckpt._errors import InvalidArgumentError
from ajaxckpt._names import (
    UnnameableKeyError,
    format_key,
    is_canonical,
    join_segments,
    relative_name,
    split_name,
)
from ajaxckpt._patterns import (
    Pattern,
    near_names,
    parse_pattern,
    select_names,
    top_level,
)

# A loaded machine is slow, not wrong.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
Colour = enum.Enum("Colour", {"RED": 1, "a b": 2, "7": 3, "<x>": 4})
Point = namedtuple("Point", "x y")
HIDDEN_RANGES = [
    (0x00, 0x1F),
    (0x7F, 0xA0),
    (0x200B, 0x200F),
    (0x2028, 0x202F),
    (0x2060, 0x206F),
    (0xD800, 0xDFFF),
    (0xFEFF, 0xFEFF),
    (0xFFF9, 0xFFFB),
]


class Level(enum.IntEnum):
    LOW = -3


class Word(enum.StrEnum):
    DOT = "a.b"


class Bits(enum.Flag):
    A = 1
    B = 2


class Mixed(str):
    def __str__(self):
        return "misleading"


SPELLINGS = [
    # the str rule, bare
    ("w", "w"),
    ("mlp/~/linear_0", "mlp/~/linear_0"),
    ("-", "-"),
    ("-a", "-a"),
    ("+1", "+1"),
    ("1_000", "1_000"),
    ("0x1", "0x1"),
    ("None", "None"),
    ("__metadata", "__metadata"),
    ("__metadata__x", "__metadata__x"),
    ("é'(=)|;:#\u3000", "é'(=)|;:#\u3000"),
    ("\u0663", "\u0663"),
    ("\U0001f600", "\U0001f600"),
    # the str rule, quoted
    ("", '""'),
    ("0", '"0"'),
    ("007", '"007"'),
    ("-0", '"-0"'),
    ("-12", '"-12"'),
    ("9" * 5000, f'"{"9" * 5000}"'),
    ("__metadata__", '"__metadata__"'),
    ("a.b", '"a.b"'),
    ("a b", '"a b"'),
    ('a"b', r'"a\"b"'),
    ("a\\b", r'"a\\b"'),
    ("a\nb", r'"a\u000ab"'),
    ("\ufeff", r'"\ufeff"'),
    ("\ud83d\ude00", r'"\ud83d\ude00"'),
    ("\udfff", r'"\udfff"'),
    ("<none>", '"<none>"'),
    (np.str_("a b"), '"a b"'),
    (Word.DOT, '"a.b"'),
    (Mixed("true"), "true"),
    # the int rule
    (0, "0"),
    (-1, "-1"),
    (42, "42"),
    (10**4000, "1" + "0" * 4000),
    (np.int8(-7), "-7"),
    (np.uint64(2**64 - 1), "18446744073709551615"),
    (Level.LOW, "-3"),
    # typed
    (None, "<none>"),
    (True, "<bool:True>"),
    (False, "<bool:False>"),
    (np.True_, "<bool:True>"),
    (1.0, "<float:1.0>"),
    (-0.0, "<float:-0.0>"),
    (1e16, "<float:1e+16>"),
    (float("nan"), "<float:nan>"),
    (float("-inf"), "<float:-inf>"),
    (np.float64(0.1), "<float:0.1>"),
    (1j, "<complex:0.0,1.0>"),
    (complex(-0.0, float("nan")), "<complex:-0.0,nan>"),
    (np.complex128(2), "<complex:2.0,0.0>"),
    (b"", "<bytes:>"),
    (b"\x00\xff", "<bytes:00ff>"),
    (Colour["RED"], "<enum:RED>"),
    (Colour["a b"], '<enum:"a b">'),
    (Colour["7"], '<enum:"7">'),
    (Bits.A | Bits.B, "<enum:A|B>"),
    ((), "<tuple:>"),
    (("",), '<tuple:"">'),
    ((1, "1", "a", None), '<tuple:1,"1",a,<none>>'),
    ((1.5, (2, "x,y")), '<tuple:<float:1.5>,<tuple:2,"x,y">>'),
    (Point(1, 2), "<tuple:1,2>"),
    (frozenset(), "<frozenset:>"),
    # by spelling: '"' < "1" < "2" < "a"
    (frozenset([10, 2, "a", "b c"]), '<frozenset:"b c",10,2,a>'),
]


@pytest.mark.parametrize(
    "key, spelling", SPELLINGS, ids=[ascii(spelling)[:40] for _, spelling in SPELLINGS]
)
def test_each_kind_of_key_has_its_spelling(key, spelling):
    assert format_key(key) == spelling
    assert split_name(spelling) == (spelling,)


def test_every_code_point_is_bare_quoted_or_escaped_by_the_fixed_lists():
    for code in [*range(0x10000), 0x1F600, 0xE0001, 0x10FFFF]:
        char = chr(code)
        if any(low <= code <= high for low, high in HIDDEN_RANGES):
            expected = f'"\\u{code:04x}"'
            wrong = [f'"{char}"', char, f'"\\u{code:04X}"', f'"\\U{code:08x}"']
        elif char in '"\\':
            expected = f'"\\{char}"'
            wrong = [f'"{char}"', char, f'"\\u{code:04x}"']
        elif char in ".*?[]{}<>, 0123456789":
            expected = f'"{char}"'
            wrong = [f'"\\{char}"', f'"\\u{code:04x}"']
        else:
            expected = char
            wrong = [f'"{char}"', f'"\\u{code:04x}"']
        assert format_key(char) == expected
        assert is_canonical(expected)
        assert [text for text in wrong if text != expected and is_canonical(text)] == []


REFUSED = [
    (np.float32(1), "keys of type numpy.float32 cannot be named"),
    (np.complex64(1), "keys of type numpy.complex64 cannot be named"),
    (np.timedelta64(1, "s"), "keys of type numpy.timedelta64 cannot be named"),
    (object, "keys of type type cannot be named"),
    ([], "keys of type list cannot be named"),
    (range(3), "keys of type range cannot be named"),
    ((1, np.float16(2)), "keys of type numpy.float16 cannot be named"),
    (10**5000, "an int of 16610 bits is too long to name"),
    (Bits(0), f"a {Bits.__module__}.Bits without a name"),
]


@pytest.mark.parametrize("key, message", REFUSED, ids=[m for _, m in REFUSED])
def test_other_keys_are_refused_by_type(key, message):
    with pytest.raises(UnnameableKeyError, match=rf"\A{re.escape(message)}\Z"):
        format_key(key)


def test_nesting_is_bounded_alike_when_spelling_and_when_splitting():
    key = ()
    for _ in range(31):
        key = (key,)
    deepest = "<tuple:" * 32 + ">" * 32
    assert format_key(key) == deepest
    assert split_name(deepest) == (deepest,)
    with pytest.raises(UnnameableKeyError, match="nested deeper than 32 levels"):
        format_key(frozenset([key]))
    with pytest.raises(ValueError, match="position 235: nested deeper than 32 levels"):
        split_name(f"<frozenset:{deepest[:-1]}>>")


SPLITS = [
    ("", ()),
    ("a", ("a",)),
    ("opt_state.1.0.mu.w", ("opt_state", "1", "0", "mu", "w")),
    ('a."b.c".0', ("a", '"b.c"', "0")),
    ('<tuple:<float:1.5>,"a.b">.x', ('<tuple:<float:1.5>,"a.b">', "x")),
    (r'"\"."."."', (r'"\"."', '"."')),
    ('"".""', ('""', '""')),
    ("<frozenset:<float:nan>,<float:nan>>", ("<frozenset:<float:nan>,<float:nan>>",)),
]


@pytest.mark.parametrize("name, segments", SPLITS)
def test_names_split_into_their_segments(name, segments):
    assert split_name(name) == segments
    assert join_segments(segments) == name
    assert is_canonical(name)


NOT_NAMES = [
    ("a b", r'"a b"', 1, "a blank stands only in quotes"),
    ("a.b?", '"a.b?"', 3, "'?' stands only in quotes"),
    ('a"b', r'"a\"b"', 1, "'\"' stands only in quotes"),
    ("a\u200b", r'"a\u200b"', 1, "U+200B stands only in quotes"),
    ("a<b>", '"a<b>"', 1, "'<' stands only in quotes"),
    (".a", '".a"', 0, "a segment is empty"),
    ("a..b", '"a..b"', 2, "a segment is empty"),
    ("a.", '"a."', 2, "a segment is empty"),
    ("a.007", '"a.007"', 2, "007 stands only in quotes"),
    ("-0", '"-0"', 0, "-0 stands only in quotes"),
    ("a.__metadata__", '"a.__metadata__"', 2, "__metadata__ stands only in quotes"),
    ('"ab"', r'"\"ab\""', 0, "the quotes are not needed"),
    ('a."b', r'"a.\"b"', 2, "the quote is not closed"),
    ('"a.', r'"\"a."', 0, "the quote is not closed"),
    ('"a b"c', r'"\"a b\"c"', 5, "expected a dot or the end"),
    (r'"\n"', r'"\"\\n\""', 1, "not an escape of this grammar"),
    (r'"\u0041"', r'"\"\\u0041\""', 1, "not an escape of this grammar"),
    (r'"\u00A0"', r'"\"\\u00A0\""', 1, "not an escape of this grammar"),
    ('"\n"', r'"\"\u000a\""', 1, "U+000A is not escaped"),
    ("<foo>", '"<foo>"', 0, "not a typed segment of this grammar"),
    ("<none>x", '"<none>x"', 6, "expected a dot or the end"),
    ("<bool:true>", '"<bool:true>"', 0, "not a typed segment of this grammar"),
    ("<float:1>", '"<float:1>"', 0, "not the repr of a float"),
    ("<float:1.00>", '"<float:1.00>"', 0, "not the repr of a float"),
    ("<float:x>", '"<float:x>"', 0, "not the repr of a float"),
    ("<complex:1.0,1>", '"<complex:1.0,1>"', 0, "not the repr of a float"),
    ("<bytes:0>", '"<bytes:0>"', 0, "an odd number of hex digits"),
    ("<bytes:AA>", '"<bytes:AA>"', 0, "not a typed segment of this grammar"),
    ("<enum:1>", '"<enum:1>"', 6, "1 stands only in quotes"),
    ("<enum:>", '"<enum:>"', 6, "'>' stands only in quotes"),
    ("<tuple:1", '"<tuple:1"', 8, 'expected ">"'),
    ("<tuple:1,>", '"<tuple:1,>"', 9, "'>' stands only in quotes"),
    ("<tuple:1.2>", '"<tuple:1.2>"', 8, 'expected ">"'),
    ("<frozenset:b,a>", '"<frozenset:b,a>"', 13, "the members are not sorted"),
]


@pytest.mark.parametrize("text, shown, position, problem", NOT_NAMES)
def test_other_spellings_are_refused_with_their_position(
    text, shown, position, problem
):
    with pytest.raises(ValueError) as caught:
        split_name(text)
    expected = f"{shown} is not a leaf name: position {position}: {problem}"
    assert str(caught.value) == expected
    assert not is_canonical(text)


def test_long_texts_are_cut_around_the_position():
    with pytest.raises(ValueError) as caught:
        split_name("a" * 1000 + " " + "b" * 1000)
    assert str(caught.value) == (
        f'"{"a" * 40} {"b" * 39}" (2001 characters) is not a leaf name: '
        "position 1000: a blank stands only in quotes"
    )


# Keys made to collide: of the grammar's own characters, and of spelled names.
ADVERSARIAL = st.text(
    '."\\*?[]{}<>, -019aeu:Ntl_\n\x7f\xa0\u200b\ufeff\ud800\udc00\U0001f600', max_size=6
)
PLAIN_KEYS = st.one_of(
    ADVERSARIAL,
    st.text(max_size=4),
    st.sampled_from(["__metadata__", "none", "True", "1.0", "RED", "<none>", "0,1"]),
    st.integers(-12, 12),
    st.integers(),
    st.none(),
    st.booleans(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.binary(max_size=3),
    st.sampled_from(list(Colour)),
)
KEYS = st.recursive(
    PLAIN_KEYS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple),
        st.frozensets(inner, max_size=3),
        inner.map(format_key),
    ),
    max_leaves=6,
)
PATHS = st.lists(KEYS, max_size=4)


def spell(path):
    return join_segments(format_key(key) for key in path)


@patient
@given(PATHS)
def test_splitting_undoes_joining(path):
    segments = tuple(format_key(key) for key in path)
    assert split_name(join_segments(segments)) == segments


def rivals_of(path):
    """The paths most like to collide: spelled parts of this one taken as text."""
    yield [spell(path)]
    for at, key in enumerate(path):
        yield [*path[:at], format_key(key), *path[at + 1 :]]
        yield [*path[:at], spell(path[at:])]


@patient
@given(st.lists(PATHS, min_size=2, max_size=6))
def test_distinct_paths_never_share_a_name(paths):
    first_of = {}
    for path in itertools.chain(paths, *map(rivals_of, paths)):
        assert first_of.setdefault(spell(path), path) == path


def test_short_strings_and_pairs_of_them_never_share_a_name():
    alphabet = '."\\<>,-01a\n'
    texts = [
        "".join(chars)
        for n in range(4)
        for chars in itertools.product(alphabet, repeat=n)
    ]
    few = [*texts[: 1 + 11 + 121], 0, 1, -1, None, (), ("a",), 1.0]
    names = [spell([text]) for text in texts]
    names += [spell([value]) for value in few if not isinstance(value, str)]
    names += [spell(pair) for pair in itertools.product(few, repeat=2)]
    assert len(set(names)) == len(names) == 1464 + 7 + 140**2


def decode(segment):
    """Read a segment back to its key, written apart from the module."""
    if segment[0] == '"':
        return ast.literal_eval(segment)
    if segment[0] != "<":
        return int(segment) if re.fullmatch("-?[0-9]+", segment) else segment
    kind, _, content = segment[1:-1].partition(":")
    parts = split_outside_quotes(content)
    readers = {
        "none": lambda: None,
        "bool": lambda: {"True": True, "False": False}[content],
        "float": lambda: float(content),
        "complex": lambda: complex(*map(float, parts)),
        "bytes": lambda: bytes.fromhex(content),
        "tuple": lambda: tuple(map(decode, parts)),
        "frozenset": lambda: frozenset(map(decode, parts)),
    }
    return readers[kind]()


def split_outside_quotes(text):
    parts, depth, quoted, skip = [""], 0, False, False
    for char in text:
        if skip:
            skip = False
        elif quoted:
            skip, quoted = char == "\\", char != '"'
        else:
            quoted = char == '"'
            depth += (char == "<") - (char == ">")
            if char == "," and not depth:
                parts.append("")
                continue
        parts[-1] += char
    return parts if text else []


def assert_refused_or_canonical(text):
    try:
        segments = split_name(text)
    except ValueError:
        assert not is_canonical(text)
        return False
    assert is_canonical(text)
    assert ".".join(segments) == text
    for segment in segments:
        if segment.startswith("<enum:"):
            assert format_key(decode(segment[6:-1])) == segment[6:-1]
        elif "<enum:" not in segment:
            assert format_key(decode(segment)) == segment
    return True


def test_every_short_text_is_refused_or_canonical():
    alphabet = '."\\0-a >'
    texts = (
        "".join(chars)
        for n in range(6)
        for chars in itertools.product(alphabet, repeat=n)
    )
    accepted = sum(map(assert_refused_or_canonical, texts))
    assert 100 < accepted < 8**5


TOKENS = [*'.",<>-0aZ ', r"\"", r"\u00a0", r"\u00A0", "1.0", "<none>", "\u200b"]
TOKENS += ["<float:", "<complex:", "<bytes:", "<enum:", "<tuple:", "<frozenset:"]


TEXTS = st.lists(st.sampled_from(TOKENS), max_size=6).map("".join)


@settings(patient, max_examples=500)
@given(TEXTS | TEXTS.map(lambda text: f'"{text}"') | st.text())
def test_any_text_is_refused_or_canonical(text):
    assert_refused_or_canonical(text)


@settings(patient, max_examples=300)
@given(PATHS, st.data())
def test_a_damaged_name_is_refused_or_canonical(path, data):
    name = spell(path)
    at = data.draw(st.integers(0, len(name)))
    cut = data.draw(st.integers(0, 2))
    added = data.draw(st.text('."\\<>,-01aun: \n\ufeff', max_size=2))
    assert_refused_or_canonical(name[:at] + added + name[at + cut :])


HOSTILE = {
    "dots": "a." * 300_000 + "a",
    "digits": "9" * 1_000_000,
    "digits and a letter": "0" * 1_000_000 + "a",
    "escapes": '"' + r"\"" * 300_000 + '"',
    "members": "<tuple:" + "1," * 300_000 + "1>",
    "bytes": "<bytes:" + "00" * 500_000 + ">",
    "nested": "<tuple:" * 32 + "1" * 1_000_000 + ">" * 32,
}
HOSTILE_REFUSED = {
    "zeros": "0" * 1_000_000,
    "open quote": '"' + "a" * 1_000_000,
    "open quote of escapes": '"' + r"\\" * 300_000,
    "brackets": "<tuple:" * 200_000,
    "float": "<float:" + "1" * 1_000_000 + ">",
    "blank at the end": "a" * 1_000_000 + " ",
}


@pytest.mark.parametrize("kind", [*HOSTILE, *HOSTILE_REFUSED])
def test_hostile_megabytes_take_linear_time(kind):
    text = HOSTILE.get(kind) or HOSTILE_REFUSED[kind]
    pattern = parse_pattern("**.x.**.*a*b*c*d.**.*.y")
    start = time.perf_counter()
    assert is_canonical(text) == (kind in HOSTILE)
    assert not pattern.matches(text)
    # Quadratic time would be hours.
    assert time.perf_counter() - start < 20


RELATIVES = [
    ("a.b.c", "a", "b.c"),
    ("a.b.c", "a.b", "c"),
    ("a.b", "a.b", ""),
    ("a.b", "", "a.b"),
    ("", "", ""),
    ("", "a", None),
    ("ab.c", "a", None),
    ("a", "a.b", None),
    ('"a.b".c', '"a.b"', "c"),
]


@pytest.mark.parametrize("name, prefix, expected", RELATIVES)
def test_relative_name_cuts_whole_segments(name, prefix, expected):
    assert relative_name(name, prefix) == expected


@patient
@given(PATHS, PATHS)
def test_relative_name_is_the_rest_of_the_path(above, below):
    whole, prefix = spell([*above, *below]), spell(above)
    assert relative_name(whole, prefix) == spell(below)
    assert (relative_name(prefix, whole) is None) == bool(below)


PATTERNS = [
    # pattern, selected, not selected
    ("", ["", "a", "a.b"], []),
    ("**", ["", "a", "a.b", '"x y"'], []),
    ("a", ["a", "a.b", "a.b.c"], ["", "ab", "b", "b.a", '"a."']),
    ("a.b", ["a.b", "a.b.c"], ["a", "a.bc", "a.c.b"]),
    ("*", ["a", "0", '"x.y"', "<none>", "a.b"], [""]),
    ("*.w", ["a.w", '"x.w".w', "<float:1.5>.w", "a.w.x"], ["w", "a.b.w", '"x.w"']),
    ("a.*", ["a.b", "a.b.c"], ["a", "b"]),
    ("**.w", ["w", "a.w", "a.b.w", "a.w.x"], ["a", "a.ww", '"a.w"']),
    ("a.**", ["a", "a.b", "a.b.c"], ["", "b", "ab"]),
    ("a.**.w", ["a.w", "a.b.c.w", "a.b.w.x"], ["w", "a", "b.w"]),
    ("**.a.b.**.a.c", ["a.b.a.c", "x.a.a.b.y.a.a.c"], ["a.b.c", "a.c.a.b"]),
    (
        "Dense_*",
        ["Dense_0", "Dense_", "Dense_a.w"],
        ["Dense", "aDense_0", '"Dense_ 0"'],
    ),
    ("*a*b", ["ab", "xaxb", "aab", "abab", "ab.c"], ["a", "ba", "abx", '"a b"']),
    ("*b*a*", ["ba", "bab", "xbxax"], ["ab", "b"]),
    ("*1*", ["1", "-1", "213", "x1y"], ["2", '"1"', '"01"', "<float:1.0>"]),
    ('"a.b"', ['"a.b"', '"a.b".c'], ["a.b", '"a.bc"']),
    ('"*"', ['"*"'], ["a", '"a"', '"**"']),
    ("0", ["0", "0.a"], ['"0"', "00a"]),
    ("<float:1.5>", ["<float:1.5>", "<float:1.5>.a"], ["<float:1.55>"]),
    ("<tuple:1,2>.*", ["<tuple:1,2>.a"], ["<tuple:1,2>"]),
    ("*.x", ["<tuple:<tuple:<float:1.5>>,2>.x", r'"\".x".x'], [r'"\".x"']),
    ("+(|)^$", ["+(|)^$"], ["+", ""]),
]


@pytest.mark.parametrize("text, selected, others", PATTERNS)
def test_patterns_select_a_leaf_and_all_below(text, selected, others):
    pattern = parse_pattern(text)
    assert pattern.text == text
    assert [name for name in selected if not pattern.matches(name)] == []
    assert [name for name in others if pattern.matches(name)] == []


def test_patterns_are_values():
    assert parse_pattern("a.*") == parse_pattern("a.*") != parse_pattern("a.**")
    assert repr(parse_pattern("a.*")) == "Pattern(text='a.*')"
    assert isinstance(parse_pattern("a"), Pattern)


def slow_matches(pattern, segments):
    """Match a list of pattern segments with a list of segments, one by one."""
    if not pattern:
        return True
    first, *rest = pattern
    if first == "**":
        tails = (segments[n:] for n in range(len(segments) + 1))
        return any(slow_matches(rest, tail) for tail in tails)
    if not segments or not slow_fits(first, segments[0]):
        return False
    return slow_matches(rest, segments[1:])


def slow_fits(pattern, segment):
    if pattern == "*" or pattern == segment:
        return True
    if pattern[0] in '"<' or segment[0] in '"<':
        return False
    return slow_glob(pattern, segment)


def slow_glob(pattern, text):
    if not pattern:
        return not text
    if pattern[0] == "*":
        return any(slow_glob(pattern[1:], text[n:]) for n in range(len(text) + 1))
    return text[:1] == pattern[0] and slow_glob(pattern[1:], text[1:])


TRICKY = [
    '"a.b"',
    '"*"',
    r'"\".a"',
    "<float:1.5>",
    '<tuple:<float:1.5>,"a.b">',
    "<tuple:>",
]
UNQUOTED = st.text("ab", min_size=1, max_size=4) | st.sampled_from(
    ["0", "1", "-1", "11"]
)
SEGMENTS = UNQUOTED | st.sampled_from(TRICKY)
GLOBS = st.text("ab1-*", min_size=2, max_size=5).map(
    lambda text: re.sub(r"[*]+", "*", text)
)
PATTERN_SEGMENTS = (
    SEGMENTS | st.sampled_from(["*", "**"]) | GLOBS.filter(lambda text: "*" in text)
)


@settings(patient, max_examples=1000)
@given(st.lists(PATTERN_SEGMENTS, max_size=5), st.lists(SEGMENTS, max_size=6))
def test_patterns_match_as_the_slow_reference(pattern, segments):
    fast = parse_pattern(".".join(pattern)).matches(join_segments(segments))
    assert fast == slow_matches(pattern, segments)


def test_all_small_patterns_match_as_the_slow_reference():
    def lists(items):
        return [list(x) for n in range(4) for x in itertools.product(items, repeat=n)]

    names = lists(["a", "ab", "b", '"a.b"', "<float:1.5>"])
    for pattern in lists(["a", "*b", "a*", "*", "**", '"a.b"']):
        matches = parse_pattern(".".join(pattern)).matches
        found = [name for name in names if matches(".".join(name))]
        assert found == [name for name in names if slow_matches(pattern, name)]


def test_all_short_globs_match_as_the_slow_reference():
    def words(alphabet):
        return (
            "".join(x)
            for n in range(1, 6)
            for x in itertools.product(alphabet, repeat=n)
        )

    names = list(words("ab"))
    for glob in (word for word in words("ab*") if "*" in word and "**" not in word):
        matches = parse_pattern(glob).matches
        assert list(filter(matches, names)) == [x for x in names if slow_fits(glob, x)]


NOT_PATTERNS = [
    ("opt[0]", "opt[0]", 3, "'[' stands only in quotes", "write opt.0"),
    ("['opt'][0]", "['opt'][0]", 0, "'[' stands only in quotes", "write opt.0"),
    (".opt.", ".opt.", 0, "a segment is empty", "write opt"),
    ("opt?", "opt?", 3, "'?' stands only in quotes", 'quote the segment: "opt?"'),
    ("a.b?.c", "a.b?.c", 3, "'?' stands only in quotes", 'quote the segment: "b?"'),
    ("a.{1}", "a.{1}", 2, "'{' stands only in quotes", 'quote the segment: "{1}"'),
    ("*.a b", "*.a b", 3, "a blank stands only in quotes", 'quote the segment: "a b"'),
    ("a*]", "a*]", 2, "']' stands only in quotes", 'quote the segment: "a*]"'),
    ("007", "007", 0, "007 stands only in quotes", 'quote the segment: "007"'),
    ("a..b", "a..b", 2, "a segment is empty", "write a.b"),
    (
        "\ud800",
        r"\ud800",
        0,
        "U+D800 stands only in quotes",
        r'quote the segment: "\ud800"',
    ),
    (
        "x.a**b",
        "x.a**b",
        3,
        '"**" stands alone between dots; within a segment write "*"',
        "write a*b",
    ),
    (
        '*."a"',
        r"*.\"a\"",
        2,
        "the quotes are not needed",
        "copy the segment as the leaf's name spells it",
    ),
    (
        "<float:1>",
        "<float:1>",
        0,
        "not the repr of a float",
        "copy the segment as the leaf's name spells it",
    ),
]


@pytest.mark.parametrize("text, shown, position, problem, hint", NOT_PATTERNS)
def test_bad_patterns_are_refused_saying_how_to_write_them(
    text, shown, position, problem, hint
):
    expected = (
        f'="{shown}" is not a pattern: position {position}: {problem}\nTo mend: {hint}'
    )
    with pytest.raises(InvalidArgumentError) as caught:
        parse_pattern(text)
    assert str(caught.value) == f"pattern{expected}"
    with pytest.raises(InvalidArgumentError) as caught:
        select_names(text, ["a"], argument="keep")
    assert str(caught.value) == f"keep{expected}"


def test_the_hint_of_a_bad_pattern_is_a_pattern():
    for text, *_, hint in NOT_PATTERNS:
        for start in ("quote the segment: ", "write "):
            if hint.startswith(start):
                assert parse_pattern(hint.removeprefix(start)).text != text


def test_overlong_patterns_are_refused():
    assert parse_pattern("a" * 1_000).matches("a" * 1_000)
    with pytest.raises(InvalidArgumentError) as caught:
        parse_pattern("a" * 1_001)
    assert str(caught.value) == (
        f'pattern="{"a" * 80}" (1001 characters) is longer than 1000 characters'
    )


LEAVES = ["buffer.obs", "buffer.size", "actor.w", "actor.b", '"x y".0', "step"]


def test_select_names_unites_the_patterns():
    assert select_names("actor", LEAVES, argument="keep") == {"actor.w", "actor.b"}
    both = select_names(iter(["*.w", "step"]), LEAVES, argument="keep")
    assert both == {"actor.w", "step"}
    assert select_names([], LEAVES, argument="keep") == set()
    assert select_names("", LEAVES, argument="keep") == set(LEAVES)


SELECTS_NOTHING = [
    ("bufer", LEAVES, "bufer", "use buffer or buffer.obs or buffer.size"),
    (["step", "actor.v"], LEAVES, "actor.v", "use actor.w or actor.b or actor"),
    ("zzz", LEAVES, "zzz", 'the names begin with buffer, actor, "x y", step'),
    ('"?"', ["step"], r"\"?\"", "the names begin with step"),
    ("a", [""], "a", 'the state is one leaf, named ""'),
    ("**", [], "**", "there are no leaves"),
    (
        "zzz",
        [f"l{n}" for n in range(13)],
        "zzz",
        "the names begin with l0, l1, l2, l3, l4, l5, l6, l7, l8, l9 and 3 more",
    ),
]


@pytest.mark.parametrize("patterns, names, shown, hint", SELECTS_NOTHING)
def test_a_pattern_that_selects_nothing_is_refused(patterns, names, shown, hint):
    with pytest.raises(InvalidArgumentError) as caught:
        select_names(patterns, names, argument="keep")
    assert str(caught.value) == f'keep="{shown}" selects no leaf\nTo mend: {hint}'


NOT_TEXT = [
    ([b"a"], "keep: expected a str pattern, found bytes"),
    (["a", 3], "keep: expected a str pattern, found int"),
    (None, "keep: expected patterns, found NoneType"),
]


@pytest.mark.parametrize("patterns, message", NOT_TEXT)
def test_patterns_that_are_no_text_are_refused(patterns, message):
    with pytest.raises(InvalidArgumentError) as caught:
        select_names(patterns, ["a"], argument="keep")
    assert str(caught.value) == message
    with pytest.raises(InvalidArgumentError, match=r"\Apattern: .*found int\Z"):
        parse_pattern(3)


NEAR = [
    ("buffes", ["buffer"]),  # a slip at the end, among many names that sort between
    ("xuffer", ["buffer"]),
    ("buffer.99.ob", ["buffer.99.obs"]),
    ("params.Dense_0", ["actor.params.Dense_0"]),
    ("zzz", []),
    ("b" * 1_000_000, []),
]


@pytest.mark.parametrize("text, expected", NEAR, ids=lambda value: str(value)[:20])
def test_near_names_finds_slips_among_many_names(text, expected):
    names = [f"buffer.{n}.obs" for n in range(20_000)]
    names += ["actor.params.Dense_0.kernel", '"x.y".z', "c." * 500_000 + "c"]
    start = time.perf_counter()
    assert near_names(text, names)[:1] == expected
    assert time.perf_counter() - start < 20


def test_near_names_are_names_or_whole_ancestors():
    names = ['"x.y".<float:1.5>.z', '"x.y".w']
    assert set(near_names('"x.y"', names, limit=9)) == {'"x.y"', '"x.y".w'}
    assert near_names('"x.y".<float:1.4>', names, limit=1) == ['"x.y".<float:1.5>']


def test_top_level_lists_first_segments_in_order():
    names = ["b.x", '"a.b".c', "b.y", "<float:1.5>.z", "", "0"]
    assert top_level(names) == ["b", '"a.b"', "<float:1.5>", "0"]
    assert top_level(names, limit=2) == ["b", '"a.b"']
    assert top_level([""]) == []
