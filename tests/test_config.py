from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflagcx.config import (
    ENVIRONMENT_PREFIX,
    Config,
    accepted_values,
    format_size,
)
from aioflagcx.errors import ConfigError

FIELDS = dataclasses.fields(Config)
NUMBERS = [field for field in FIELDS if field.metadata["min"] is not None]
DOCS = Path(__file__).parent.parent / "docs" / "configuration.md"

DEFAULTS = {
    "slice_size": 65_536,
    "workers_per_device": None,
    "qps_per_endpoint": None,
    "max_wr_per_qp": 256,
    "max_inflight_bytes_per_endpoint": 8 * 2**20,
    "post_batch": 16,
    "spin_us": 20,
    "connect_timeout": 5.0,
    "transfer_timeout": 30.0,
    "drain_timeout": 1.0,
    "keepalive_interval": 1.0,
    "keepalive_timeout": 5.0,
    "retry_count": 3,
    "rnr_retry": 7,
    "handshake_max_frame": 16 * 2**20,
    "handshake_max_frame_unauthenticated": 4096,
    "auth_secret": None,
    "notification_queue_length": 65_536,
    "notification_queue_bytes": 64 * 2**20,
    "notification_max_payload": 2**20,
    "devices": "auto",
    "soft_paths": ("process", "local", "tcp"),
    "soft_streams": 2,
    "allow_ptrace": False,
    "gid_index": None,
    "traffic_class": 0,
    "service_level": 0,
    "qp_timeout": 16,
    "qp_retry_count": 6,
    "relaxed_ordering": False,
    "bind_address": None,
    "log_level": None,
}


def table_row(field: dataclasses.Field[object]) -> str:
    """The row of docs/configuration.md for a field; run this file to print the whole table."""
    meta = field.metadata
    default = field.default
    if default is None:
        shown = "none"
    elif meta["kind"] == "size":
        shown = format_size(default)  # type: ignore[arg-type]
    elif isinstance(default, tuple):
        shown = ",".join(default)
    else:
        shown = str(default)
    variable = ENVIRONMENT_PREFIX + field.name.upper()
    cells = [f"`{field.name}`", f"`{variable}`", shown, meta["unit"], accepted_values(field)]
    return "| " + " | ".join([*cells, meta["reason"]]) + " |"


def test_defaults_are_the_documented_ones() -> None:
    assert dataclasses.asdict(Config()) == DEFAULTS
    assert Config.from_env({}) == Config()


def test_every_field_has_a_unit_and_a_reason() -> None:
    for field in FIELDS:
        assert field.metadata["unit"], field.name
        assert len(field.metadata["reason"]) > 30, field.name


def test_the_docs_table_is_in_step() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert rows == [table_row(field) for field in FIELDS]


@pytest.mark.parametrize("text", ["1024", "1KiB", "1 KiB", " 1KiB ", "1024B"])
def test_sizes_take_bytes_and_suffixes(text: str) -> None:
    assert Config.from_env({"AIOFLAGCX_SLICE_SIZE": text}).slice_size == 1024


def test_every_kind_of_value_is_read_from_the_environment() -> None:
    config = Config.from_env(
        {
            "AIOFLAGCX_MAX_INFLIGHT_BYTES_PER_ENDPOINT": "1GiB",
            "AIOFLAGCX_HANDSHAKE_MAX_FRAME": "32MiB",
            "AIOFLAGCX_SPIN_US": "0",
            "AIOFLAGCX_CONNECT_TIMEOUT": "2.5",
            "AIOFLAGCX_TRANSFER_TIMEOUT": "none",
            "AIOFLAGCX_AUTH_SECRET": " two words ",
            "AIOFLAGCX_DEVICES": "mlx5_0, mlx5_1",
            "AIOFLAGCX_SOFT_PATHS": "process, tcp",
            "AIOFLAGCX_ALLOW_PTRACE": "Yes",
            "AIOFLAGCX_BIND_ADDRESS": "::1",
            "AIOFLAGCX_LOG_LEVEL": "debug",
            "PATH": "/bin",
        }
    )
    assert config.max_inflight_bytes_per_endpoint == 2**30
    assert config.handshake_max_frame == 2**25
    assert config.spin_us == 0
    assert config.connect_timeout == 2.5
    assert config.transfer_timeout is None
    assert config.auth_secret == " two words "
    assert config.devices == "mlx5_0,mlx5_1"
    assert config.soft_paths == ("process", "tcp")
    assert config.allow_ptrace is True
    assert config.bind_address == "::1"
    assert config.log_level == "DEBUG"


def test_an_unknown_variable_is_named_with_its_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_env({"AIOFLAGCX_SLICESIZE": "1"})
    assert "AIOFLAGCX_SLICESIZE" in str(caught.value)
    assert 'did you mean "AIOFLAGCX_SLICE_SIZE"' in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SLICE_SIZE", ""),
        ("SLICE_SIZE", "1.5"),
        ("SLICE_SIZE", "-1"),
        ("SLICE_SIZE", "64 kb"),
        ("SLICE_SIZE", "1GiB1"),
        ("SLICE_SIZE", "٤٢"),
        ("SLICE_SIZE", "9" * 5000),
        ("SPIN_US", "fast"),
        ("SPIN_US", "-1"),
        ("RNR_RETRY", "8"),
        ("RETRY_COUNT", "none"),
        ("CONNECT_TIMEOUT", "0"),
        ("CONNECT_TIMEOUT", "nan"),
        ("CONNECT_TIMEOUT", "inf"),
        ("CONNECT_TIMEOUT", "5s"),
        ("CONNECT_TIMEOUT", "none"),
        ("SOFT_PATHS", ""),
        ("SOFT_PATHS", "tcp,udp"),
        ("SOFT_PATHS", "tcp,tcp"),
        ("DEVICES", ""),
        ("DEVICES", "auto,mlx5_0"),
        ("DEVICES", "mlx5_0,,mlx5_1"),
        ("DEVICES", "../x"),
        ("DEVICES", "soft:0"),
        ("DEVICES", "soft:17"),
        ("DEVICES", "soft:999"),
        ("DEVICES", "soft:x"),
        ("DEVICES", "soft:"),
        ("DEVICES", "soft:2,soft:"),
        ("BIND_ADDRESS", "localhost"),
        ("LOG_LEVEL", "LOUD"),
        ("AUTH_SECRET", ""),
    ],
)
def test_a_bad_value_is_named_with_what_is_accepted(variable: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_env({ENVIRONMENT_PREFIX + variable: value})
    assert ENVIRONMENT_PREFIX + variable in str(caught.value)
    assert "accepted is" in str(caught.value)
    if variable != "AUTH_SECRET":
        assert repr(value) in str(caught.value)


@settings(deadline=None)
@given(st.sampled_from(FIELDS), st.text(max_size=12))
def test_any_text_is_read_or_refused_by_name(field: dataclasses.Field[object], text: str) -> None:
    variable = ENVIRONMENT_PREFIX + field.name.upper()
    try:
        Config.from_env({variable: text})
    except ConfigError as error:
        assert variable in str(error)


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
@pytest.mark.parametrize("value", [True, b"1", 1j, [], {}, "\ud800", float("nan"), 10**400])
def test_the_constructor_checks_types(field: dataclasses.Field[object], value: object) -> None:
    if field.type == "bool" and value is True:
        value = 1
    with pytest.raises(ConfigError, match=field.name):
        Config(**{field.name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", NUMBERS, ids=lambda field: field.name)
def test_bounds_are_inclusive_and_no_further(field: dataclasses.Field[object]) -> None:
    meta = field.metadata
    step = 1 if meta["kind"] in ("size", "count") else 0.001
    for outside in (meta["min"] - step, meta["max"] + step):
        with pytest.raises(ConfigError, match="accepted is"):
            Config(**{field.name: outside})
    for edge in (meta["min"], meta["max"]):
        try:
            Config(**{field.name: edge})
        except ConfigError as error:
            assert "accepted is" not in str(error)  # may only contradict another field


@pytest.mark.parametrize(
    "values",
    [
        {"keepalive_timeout": 1.0},
        {"slice_size": 2**24},
        {"handshake_max_frame": 4096},
        {"handshake_max_frame_unauthenticated": 2**20, "handshake_max_frame": 2**19},
        {"notification_queue_bytes": 1024},
        {"notification_max_payload": 16 * 2**20},
        {"max_wr_per_qp": 8},
    ],
)
def test_fields_that_contradict_each_other_are_both_named(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**values)  # type: ignore[arg-type]
    assert len(re.findall(r"\w+=\d", str(caught.value))) >= 1
    with pytest.raises(ConfigError, match="AIOFLAGCX_"):
        Config.from_env({f"AIOFLAGCX_{name.upper()}": str(v) for name, v in values.items()})


def test_the_secret_is_never_shown() -> None:
    config = Config(auth_secret="hunter2")
    assert "hunter2" not in repr(config)
    with pytest.raises(ConfigError) as caught:
        Config(auth_secret=["hunter2"])  # type: ignore[arg-type]
    assert "hunter2" not in str(caught.value)


def test_a_config_cannot_be_changed_but_replaced() -> None:
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.slice_size = 1  # type: ignore[misc]
    assert config.replace(slice_size=4096).slice_size == 4096
    assert config.slice_size == 65_536
    with pytest.raises(ConfigError, match="slice_size"):
        config.replace(slice_size=0)
    with pytest.raises(ConfigError, match='did you mean "slice_size"'):
        config.replace(slicesize=4096)


def test_whole_numbers_become_seconds() -> None:
    timeout = Config(connect_timeout=3).connect_timeout
    assert timeout == 3.0
    assert type(timeout) is float


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0"), (1000, "1000"), (65_536, "64 KiB"), (2**30, "1 GiB")]
)
def test_sizes_are_shown_in_the_unit_that_divides_them(size: int, text: str) -> None:
    assert format_size(size) == text


if __name__ == "__main__":
    print("\n".join(table_row(field) for field in FIELDS))
