from ast_rewrite._layout import layout, physical_lines, reindent


def test_strings_over_several_lines_keep_their_bytes():
    text = "    def f():\n        '''one\n        two\n    three'''\n        return (1,\n  2)\n"
    assert reindent(text, remove="    ") == "def f():\n    '''one\n        two\n    three'''\n    return (1,\n2)\n"


def test_lines_inside_an_fstring_keep_their_bytes():
    text = "    x = f'''a\n    {b}\n    c'''\n"
    assert reindent(text, remove="    ") == "x = f'''a\n    {b}\n    c'''\n"


def test_comments_further_out_stay_where_they_are():
    assert reindent("    a = 1\n# far\n  # near\n    b = 2\n", remove="    ") == "a = 1\n# far\n# near\nb = 2\n"


def test_blank_lines_get_no_indentation():
    assert reindent("a = 1\n\nb = 2", add="\t") == "\ta = 1\n\n\tb = 2"


def test_logical_lines_start_and_end_where_statements_do():
    found = layout("a = (1,\n  2)  # c\nb = 1; c = \\\n  2\n")
    assert found.starts == {(0, 0), (2, 0)}
    assert found.ends == {(1, 4), (3, 3)}


def test_columns_are_bytes():
    assert layout("ä = 'ö'\n").ends == {(0, 9 - 0)}


def test_a_form_feed_ends_no_line():
    assert physical_lines("a\x0cb\nc") == ["a\x0cb\n", "c"]
