from tools.make_cli_docs import PAGE, page


def test_the_reference_is_what_the_parser_says() -> None:
    assert PAGE.read_text("utf-8") == page(), "run python -m tools.make_cli_docs"
