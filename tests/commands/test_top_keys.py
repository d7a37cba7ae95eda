"""What the keys of fgpu-top do."""

import pytest

from exporter.commands.top_keys import Keyboard, State, press
from exporter.commands.top_rows import By, Choice, Sort

START = State(choice=Choice())


def after(keys, state=START, rows=250, room=12):
    for key in keys:
        state = press(state, key, rows=rows, room=room)
    return state


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ([b"sq"], ["s", "q"]),
        ([b"\x1b[A\x1b[B"], ["\x1b[A", "\x1b[B"]),
        ([b"\x1bOA\x1b[5~"], ["\x1bOA", "\x1b[5~"]),
        ([b"\x1b"], ["\x1b"]),
        (["é".encode()[:1], "é".encode()[1:]], ["é"]),
        ([b"\xff"], ["\ufffd"]),
        ([b"\n"], ["\n"]),
    ],
)
def test_bytes_of_a_terminal_are_keys(sent, expected):
    keyboard = Keyboard()
    assert [key for part in sent for key in keyboard.keys(part)] == expected


def test_q_leaves():
    assert after("q").leaving


def test_s_sorts_by_the_next_thing_and_begins_anew():
    sorts = [after("s" * times).choice.sort for times in range(6)]
    assert sorts == [Sort.OVER, Sort.MEMORY, Sort.SM, Sort.NAME, Sort.GPU, Sort.OVER]


def test_g_adds_up_by_the_next_thing_and_begins_anew():
    assert [after("g" * times).choice.by for times in range(5)] == [By.NONE, By.GPU, By.NAMESPACE, By.POD, By.NONE]


def test_c_hides_and_shows_containers():
    assert [after("c").containers, after("cc").containers] == [False, True]


def test_a_filter_is_typed_corrected_and_kept():
    state = after([*"/vixi", "\x7f", "\x7f", *"s", "\r"])
    assert (state.choice.filter, state.typing, state.leaving) == ("vis", False, False)


def test_letters_of_a_filter_are_no_commands():
    assert after("/qsg").choice == Choice(filter="qsg")


@pytest.mark.parametrize("keys", [["/", "a", "\x1b"], ["/", "a", "\r", "\x1b"]])
def test_escape_takes_the_filter_away(keys):
    state = after(keys)
    assert (state.choice.filter, state.typing) == ("", False)


def test_a_filter_can_be_wiped_out_and_holds_no_control_characters():
    assert after([*"/abc", "\x15", "\x01", "\x1b[A", "x"]).choice.filter == "x"


@pytest.mark.parametrize(
    ("keys", "first"),
    [
        (["\x1b[B"], 1),
        (["j", "j", "k"], 1),
        (["\x1b[A"], 0),
        (["\x1b[6~"], 12),
        ([" ", " ", "\x1b[5~"], 12),
        (["\x1b[F"], 238),
        (["\x1b[F", "\x1b[B"], 238),
        (["\x1b[F", "\x1b[H"], 0),
    ],
)
def test_arrows_and_page_keys_scroll_within_the_rows(keys, first):
    assert after(keys).first == first


def test_rows_that_all_have_room_do_not_scroll():
    assert after(["\x1b[B", "\x1b[6~", "\x1b[F"], rows=5, room=12).first == 0


def test_a_new_order_begins_at_the_top():
    assert after(["\x1b[6~", "s"]).first == 0


def test_any_other_key_does_nothing():
    assert after(["x", "\x1b[Z", "\ufffd"]) == START
