"""ScapeConfig: what is accepted, what is refused with which words, and the quota it leads to."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_scape import ScapeConfig
from lightning_scape.core.layout import MAX_BYTE_BLOCK, Quota, quota_for


@pytest.mark.parametrize(
    ("sparsity", "quota"),
    [
        (0.99, Quota(200, 2)),
        (0.9, Quota(250, 25)),
        (0.999, Quota(1000, 1)),
        (0.5, Quota(256, 128)),
        (0.0, Quota(256, 256)),
        (0.98, Quota(250, 5)),
        (0.9999, Quota(10000, 1)),
        (1 - 1 / 256, Quota(256, 1)),
    ],
)
def test_quota_is_the_largest_block_with_a_whole_number_sent(sparsity: float, quota: Quota) -> None:
    assert ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=0).quota == quota


@given(st.floats(0.0, 0.9999))
def test_quota_density_is_close_to_what_was_asked(sparsity: float) -> None:
    quota = quota_for(sparsity)
    assert 1 <= quota.sent <= quota.block_size
    assert quota.block_size <= MAX_BYTE_BLOCK or quota.sent == 1
    assert quota.density == pytest.approx(1 - sparsity, rel=0.01)


def test_the_largest_sparsity_that_an_error_names_is_taken() -> None:
    assert ScapeConfig(sparsity=0.99998).quota == Quota(50_000, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sparsity": 1.0}, r"`sparsity` must be a number in \[0.5, 1\), or 0, got 1.0"),
        ({"sparsity": 0.4}, r"`sparsity` .* got 0.4"),
        ({"sparsity": -0.1}, r"`sparsity` .* got -0.1"),
        ({"sparsity": float("nan")}, r"`sparsity` .* got nan"),
        ({"sparsity": "0.99"}, r"`sparsity` .* got '0.99'"),
        ({"sparsity": True}, r"`sparsity` .* got True"),
        ({"sparsity": 0.99999}, r"at least one entry in 65536, got 0.99999. Lower it to at most 0\.99998\.$"),
        ({"sparsity_warmup_steps": -3}, "`sparsity_warmup_steps` must be a whole number >= 0, got -3"),
        ({"sparsity": 0.0, "sparsity_warmup_steps": 3}, "`sparsity_warmup_steps` must be 0 when sparsity is 0, got 3"),
        ({"max_skipped": 0}, "`max_skipped` must be a whole number >= 1, got 0"),
        ({"check_replicas_every": -1}, "`check_replicas_every` must be a whole number >= 0, got -1"),
        ({"wire_dtype": "int2"}, "`wire_dtype` must be one of 'int4', 'fp32', got 'int2'"),
        ({"clip_norm": "global"}, "`clip_norm` must be one of 'sketch', 'local', got 'global'"),
        ({"local_group_size": 0}, '`local_group_size` must be a whole number >= 1 or "node", got 0'),
        ({"local_group_size": True}, '`local_group_size` must be a whole number >= 1 or "node", got True'),
        ({"local_group_size": "host"}, "`local_group_size` must be a whole number >= 1 or \"node\", got 'host'"),
        ({"reshard_after_forward": 1}, "`reshard_after_forward` must be True or False, got 1"),
    ],
)
def test_bad_option_is_refused_with_rule_and_value(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ScapeConfig(**options)  # type: ignore[arg-type]


def test_config_is_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ScapeConfig(sparsity_warmup_steps=0).sparsity = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError):
        ScapeConfig(0.9, sparsity_warmup_steps=0)  # type: ignore[misc]


def test_as_dict_holds_only_plain_values_and_builds_the_same_config() -> None:
    config = ScapeConfig(sparsity=0.9, wire_dtype="fp32", sparsity_warmup_steps=0)
    plain = config.as_dict()
    assert all(value is None or isinstance(value, (int, float, str)) for value in plain.values())
    assert ScapeConfig(**plain) == config
