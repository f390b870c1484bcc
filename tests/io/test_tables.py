from moe_finetune.io.text_tables import aligned, csv_text, markdown


def test_columns_are_aligned():
    assert aligned([["task", "n"], ["a", "100"]]) == "task    n\na     100"
    assert aligned([["task", "n", ""], ["a", "100", "x"]], "left") == "task  n\na     100  x"


def test_a_row_of_one_cell_widens_no_column():
    rows = [["arm", "score"], ["a group with a long name:"], ["ours", "0.25"]]
    assert aligned(rows).splitlines() == ["arm   score", "a group with a long name:", "ours   0.25"]


def test_a_pipe_table():
    assert markdown([["task", "n"], ["a", "7"]]) == "| task | n |\n| --- | --- |\n| a | 7 |\n"


def test_csv_keeps_whole_numbers_and_leaves_none_empty():
    rows = [{"a": 3, "b, c": 0.1, "d": None}, {"a": None, "b, c": 1e-9, "d": 'say "x"'}]
    assert csv_text(rows) == 'a,"b, c",d\n3,0.1,\n,1e-09,"say ""x"""\n'
