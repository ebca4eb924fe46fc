"""The settings: what is read, what is refused and how, and the table made from them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler import config
from scheduler.config import VARIABLES, BadSetting, Settings


def test_an_empty_environment_gives_the_defaults_of_the_contract() -> None:
    settings = Settings.from_env({})
    assert settings == Settings()
    assert (settings.host, settings.port, settings.log) == (
        "0.0.0.0",
        8000,
        "/tmp/tinyloop_server.log",
    )
    assert (settings.max_queue_depth, settings.prefix_pool_capacity) == (128, 16)
    assert settings.default_slo_ms is None and settings.model_path is None
    assert settings.run_dir == f"/tmp/tinyloop-{os.getuid()}-8000"
    assert settings.submit_addr == f"ipc://{settings.run_dir}/submit.ipc"


def test_every_field_is_read_from_its_own_variable() -> None:
    assert len({v.env for v in VARIABLES.values()}) == len(VARIABLES)
    for name, variable in VARIABLES.items():
        assert variable.env.removeprefix("TINYLOOP_").lower() == name
        assert variable.about.endswith(".") and variable.accepts


def test_values_are_converted_to_the_type_of_their_field() -> None:
    settings = Settings.from_env(
        {
            "PORT": " 9001 ",
            "TINYLOOP_DEFAULT_SLO_MS": "250.5",
            "TINYLOOP_KV_H_MODE": "1",
            "TINYLOOP_MODEL_ALIASES": "gpt-4o, gpt-4 ,",
            "TINYLOOP_RUN_DIR": "/tmp/x/../y",
            "TINYLOOP_EVENTS_ADDR": "tcp://127.0.0.1:7001",
            "TINYLOOP_MAX_SEQ_LEN": "",
        }
    )
    assert settings.port == 9001
    assert settings.default_slo_ms == 250.5
    assert settings.kv_h_mode is True and settings.kv_int4 is False
    assert settings.model_aliases == ("gpt-4o", "gpt-4")
    assert settings.run_dir == "/tmp/y"
    assert settings.beats_addr == "ipc:///tmp/y/beats.ipc"
    assert settings.events_addr == "tcp://127.0.0.1:7001"
    assert settings.max_seq_len is None


@pytest.mark.parametrize(
    ("env", "value", "expected"),
    [
        ("PORT", "0", "from 1 to 65535"),
        ("PORT", "80a", "from 1 to 65535"),
        ("PORT", "1_0", "from 1 to 65535"),
        ("PORT", "\u0661", "from 1 to 65535"),
        ("TINYLOOP_GRACE_S", "nan", "from 0 to 3600"),
        ("TINYLOOP_GRACE_S", "inf", "from 0 to 3600"),
        ("TINYLOOP_GRACE_S", "soon", "from 0 to 3600"),
        ("TINYLOOP_PREFILL_CHUNK", "100", "a multiple of 64"),
        ("TINYLOOP_KV_INT4", "yes", "0 or 1"),
        ("TINYLOOP_DEVICE", "tpu", "auto, cuda, cpu"),
        ("TINYLOOP_KV_FORMAT", "fp8", "h_int4"),
        ("TINYLOOP_SUBMIT_ADDR", "udp://x:1", "tcp://HOST:PORT"),
        ("TINYLOOP_BEATS_ADDR", "tcp://127.0.0.1:65536", "tcp://HOST:PORT"),
        ("TINYLOOP_BEATS_ADDR", "tcp://127.0.0.1:0", "tcp://HOST:PORT"),
        ("TINYLOOP_RUN_DIR", "/tmp/" + "x" * 110, "107 bytes"),
        ("TINYLOOP_RUN_DIR", "/tmp/" + "x" * 100, "107 bytes"),
        ("TINYLOOP_WORKERS_ADDR", "ipc:///tmp/" + "y" * 103, "107 bytes"),
    ],
)
def test_a_bad_value_names_variable_value_and_range(env: str, value: str, expected: str) -> None:
    with pytest.raises(BadSetting) as caught:
        Settings.from_env({env: value})
    line = str(caught.value)
    assert line.startswith(f"{env}={value}: expected ") and expected in line
    assert "\n" not in line


@given(st.text(max_size=30))
def test_no_text_makes_reading_fail_in_any_other_way(text: str) -> None:
    for variable in VARIABLES.values():
        try:
            Settings.from_env({variable.env: text})
        except BadSetting as ex:
            assert ex.env == variable.env and len(str(ex).splitlines()) == 1


def test_the_longest_socket_path_that_fits_is_accepted() -> None:
    room = config.MAX_IPC_PATH_BYTES - len("/workers.ipc")
    fits = "/" + "r" * (room - 1)
    assert Settings.from_env({"TINYLOOP_RUN_DIR": fits}).run_dir == fits
    with pytest.raises(BadSetting):
        Settings.from_env({"TINYLOOP_RUN_DIR": fits + "r"})


@pytest.mark.parametrize(
    ("base", "h_mode", "int4", "expected"),
    [
        (None, 0, 0, "fp32"),
        (None, 1, 0, "h"),
        (None, 0, 1, "int4"),
        (None, 1, 1, "h_int4"),
        ("int8", 0, 0, "int8"),
        ("fp16", 1, 0, "h"),
        ("h", 0, 1, "h_int4"),
        ("int4", 1, 0, "h_int4"),
        ("h_int4", 1, 1, "h_int4"),
        ("fp32", 1, 0, None),
        ("fp32", 0, 1, None),
        ("int8", 0, 1, None),
        ("int8", 1, 1, None),
    ],
)
def test_the_flags_of_the_contract_stack_onto_the_format(
    base: str | None, h_mode: int, int4: int, expected: str | None
) -> None:
    environ = {"TINYLOOP_KV_H_MODE": str(h_mode), "TINYLOOP_KV_INT4": str(int4)}
    environ |= {"TINYLOOP_KV_FORMAT": base} if base else {}
    if expected is None:
        with pytest.raises(BadSetting, match="stacks onto"):
            Settings.from_env(environ)
    else:
        assert Settings.from_env(environ).kv_format_on("cpu") == expected


def test_the_default_format_depends_on_the_device() -> None:
    assert Settings().kv_format_on("cpu") == "fp32"
    assert Settings().kv_format_on("cuda") == "fp16"


def test_unknown_names_are_one_warning_with_the_nearest_known_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environ = {"TINYLOOP_MAX_QUEUE_DEPHT": "3", "TINYLOOP_SERVICE_HOST": "x", "OTHER": "y"}
    with caplog.at_level(logging.WARNING):
        Settings.from_env(environ)
    assert len(caplog.records) == 1
    line = caplog.records[0].getMessage()
    assert "TINYLOOP_MAX_QUEUE_DEPHT (nearest: TINYLOOP_MAX_QUEUE_DEPTH)" in line
    assert "TINYLOOP_SERVICE_HOST" in line and "OTHER" not in line


def test_the_summary_names_what_was_changed() -> None:
    line = Settings.from_env({"PORT": "9000"}).summary()
    assert "PORT=9000" in line and "TINYLOOP_GRACE_S" not in line


def test_an_entry_point_prints_one_line_and_exits_78() -> None:
    code = "import os; from scheduler.config import Settings; Settings.from_env_or_exit(os.environ)"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PORT": "x", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 78
    assert done.stderr == "bad setting: PORT=x: expected an integer from 1 to 65535\n"


def test_the_table_is_checked_and_renewed_in_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- settings -->\nold\n<!-- /settings -->\nafter\n")
    assert config.main(["--check", str(readme)]) == 1
    assert "stale" in capsys.readouterr().err
    assert config.main(["--write", str(readme)]) == 0
    assert config.main(["--check", str(readme)]) == 0
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n")
    assert all(f"| `{v.env}` |" in text for v in VARIABLES.values())


def test_a_file_without_the_marks_is_refused(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("no table here\n")
    assert config.main(["--check", str(readme)]) == 1
    assert config.main(["--write", str(readme)]) == 1
    assert readme.read_text() == "no table here\n"
