"""The grammar: values, encodings, errors that say where and why."""

import codecs
import time

import pytest

from arriero.errors import ModelfileError
from arriero.modelfile import Instruction, parse


def one(text: str) -> Instruction:
    """The only instruction besides FROM."""
    (found,) = [i for i in parse("FROM x\n" + text) if i.name != "from"]
    return found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("SYSTEM plain text ", "plain text"),
        ('SYSTEM "two words"', "two words"),
        ('SYSTEM " kept "', " kept "),
        ('SYSTEM "over\ntwo lines"', "over\ntwo lines"),
        ('SYSTEM """raw "quotes" inside"""', 'raw "quotes" inside'),
        ('SYSTEM """\nlines\n"""', "\nlines\n"),
        ('SYSTEM """a """ b"""', 'a """ b'),
        ('SYSTEM "say \\"hi\\""', 'say \\"hi\\"'),
        ("SYSTEM 'single'", "'single'"),
        ('SYSTEM ""', ""),
        ('SYSTEM """"""', ""),
        ('SYSTEM a "word" in it', 'a "word" in it'),
        ('SYSTEM """# not a comment\n# nor this"""', "# not a comment\n# nor this"),
        ("SYSTEM\ttab", "tab"),
        ("  system\u00a0\u00a0nbsp", "nbsp"),
        ('SYSTEM """x"""   \r', "x"),
        ('SYSTEM """"\nends with """\nand goes on\n""""', 'ends with """\nand goes on'),
        ('SYSTEM """"quoted""""', '"quoted"'),
        ("SYSTEM say # this", "say # this"),
    ],
)
def test_a_value_is_read_as_documented(text, value):
    assert one(text).value == value


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
@pytest.mark.parametrize(
    ("written", "value"),
    [('"<|eot_id|>"', "<|eot_id|>"), ('"a b"', "a b"), ("'x'", "'x'"), ('"  lead"', "  lead"), ("<|eot|>", "<|eot|>")],
)
def test_a_stop_at_the_end_of_the_file_has_no_quotes(written, value, end):
    found = one(f"PARAMETER\tstop {written}{end}")
    assert (found.key, found.value) == ("stop", value)


def test_crlf_line_ends_are_no_part_of_values():
    modelfile = parse("FROM x\r\nPARAMETER stop a\r\nSYSTEM b\r\n")
    assert [i.value for i in modelfile] == ["x", "a", "b"]


@pytest.mark.parametrize(
    "data",
    [
        codecs.BOM_UTF8 + "FROM x\nSYSTEM ü".encode(),
        codecs.BOM_UTF16_LE + "FROM x\nSYSTEM ü".encode("utf-16-le"),
        codecs.BOM_UTF16_BE + "FROM x\nSYSTEM ü".encode("utf-16-be"),
        "FROM x\nSYSTEM ü".encode(),
        "\u00a0FROM x\nSYS\u200bTEM ü".encode(),
        "\u2028\ufeffFROM x\n\u200b\nSYSTEM ü".encode(),
    ],
)
def test_encodings_and_invisible_characters_do_not_matter(data):
    assert [(i.name, i.value) for i in parse(data)] == [("from", "x"), ("system", "ü")]


def test_every_instruction_is_read_in_order_with_its_place():
    modelfile = parse(
        "# a comment\nfrom a\n FROM b\nADAPTER l\nDRAFT d\nTEMPLATE t\nSYSTEM s\nPARAMETER temperature 1\n"
        "PARAMETER stop x\nPARAMETER stop y\nMESSAGE user hi there\nMESSAGE Assistant yes\nLICENSE one\nLICENSE two\n"
        "RENDERER r\nPARSER p\nREQUIRES 0.19.0\n"
    )
    assert modelfile.all("from") == ["a", "b"]
    assert modelfile.instructions[1] == Instruction("from", "b")
    assert (modelfile.instructions[1].line, modelfile.instructions[1].column) == (3, 2)
    assert modelfile.parameters == {"temperature": ["1"], "stop": ["x", "y"]}
    assert modelfile.messages == [("user", "hi there"), ("assistant", "yes")]
    assert modelfile.all("license") == ["one", "two"]
    assert modelfile.last("template") == "t"
    assert modelfile.last("adapter") == "l"


def test_from_may_come_after_parameters():
    assert parse("PARAMETER top_k 3\nFROM x").last("from") == "x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "(line 1, column 1): no FROM line"),
        ("SYSTEM x\n", "(line 2, column 1): no FROM line"),
        ("FROM x\nFORM y", '(line 2, column 1): command must be one of "from", "license", "template", "system"'),
        ("FROM x\nFORM y", "did you mean FROM?"),
        ("FROM x\n\n\nSYSTEM You are\nhelpful always", "(line 5, column 1): command must be one of"),
        (
            "FROM x\n\n\nSYSTEM You are\nhelpful always",
            'found "helpful"; if this belongs to the SYSTEM of line 4, use triple quotes',
        ),
        ("FROM x\nSYSTEM “You are\nhelpful”", "SYSTEM in line 2 starts with a typographic quote"),
        (
            "FROM x\n  MESSAGE tool hi",
            '(line 2, column 11): message role must be one of "system", "user", or "assistant"',
        ),
        ('FROM x\nSYSTEM """abc\n', "(line 2, column 8): unexpected EOF"),
        ('FROM x\nSYSTEM "abc', "(line 2, column 8): unexpected EOF"),
        ('FROM x\nSYSTEM "', "(line 2, column 8): unexpected EOF"),
        ("FROM x\nSYSTEM", "(line 2, column 1): SYSTEM needs a value"),
        ("FROM x\nPARAMETER stop", "(line 2, column 1): PARAMETER needs a name and a value"),
        ("FROM x\nMESSAGE user", "(line 2, column 1): MESSAGE needs a role and a text"),
        ('FROM ""', "(line 1, column 6): FROM needs a model name"),
    ],
)
def test_an_error_says_where_and_what_to_do(text, message):
    with pytest.raises(ModelfileError) as caught:
        parse(text)
    assert message in str(caught.value)
    assert str(caught.value).startswith("(line ")


def test_bytes_that_are_no_text_are_located():
    with pytest.raises(ModelfileError, match=r"^\(line 2, column 8\): this byte is not UTF-8"):
        parse(b"FROM x\nSYSTEM \xff")


def test_fences_that_nothing_closes_cost_no_more_than_their_lines():
    text = "FROM x\n" + 'SYSTEM """"\n' * 40_000
    start = time.perf_counter()
    assert len(parse(text).instructions) == 20_001
    assert time.perf_counter() - start < 5
