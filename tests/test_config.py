"""Flags and their environment variables."""

import pytest

from exporter.config import FLAGS, ConfigError, parse_config, unknown_variables

NODE = ["--node-name", "gpu-node-1"]


def test_the_defaults_are_those_of_the_documentation():
    config = parse_config(NODE, {})
    assert config.port == 9844
    assert config.sample_interval_seconds == 5.0
    assert config.utilization_window_seconds == 15.0
    assert config.compute_window_seconds == 60.0
    assert config.breach_hold_seconds == 10.0
    assert config.identity_ttl_seconds == 600.0
    assert config.kai_reservation_namespaces == ("kai-resource-reservation", "runai-reservation")


def test_every_flag_can_be_set_by_a_variable_and_the_command_line_wins():
    environment = {"FGPU_BREACH_HOLD_SECONDS": "20", "FGPU_PORT": "1", "FGPU_DRA": "true", "NODE_NAME": "from-the-downward-api"}
    config = parse_config(["--port", "2"], environment)
    assert (config.breach_hold_seconds, config.port, config.dra, config.node_name) == (20.0, 2, True, "from-the-downward-api")


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        ([*NODE, "--port", "70000"], {}, "--port: '70000' is not a number from 0 to 65535"),
        ([*NODE, "--sample-interval-seconds", "soon"], {}, "--sample-interval-seconds: 'soon' is not a number from 0.5 to 60"),
        ([*NODE, "--sample-interval-seconds", "nan"], {}, "--sample-interval-seconds: 'nan' is not"),
        (NODE, {"FGPU_BREACH_HOLD_SECONDS": "-1"}, "FGPU_BREACH_HOLD_SECONDS: '-1' is not"),
        ([*NODE, "--system-namespaces", "a,B!"], {}, "--system-namespaces: 'a,B!' is not names of namespaces"),
        ([*NODE, "--log-level", "loud"], {}, "--log-level: 'loud' is not debug, info, warning or error"),
        ([*NODE, "--dra=perhaps"], {}, "--dra: 'perhaps' is not true or false"),
        (["--scenario", "x", "--once", "--at", "never"], {}, "--at: 'never' is not a time like 90s"),
        (["--scenario", "x", "--at", "9s"], {}, "--at: only together with --once"),
        (["--demo", "--scenario", "x"], {}, "--demo and --scenario: give one of them"),
        (["--pod-source", "docker"], {}, "--pod-source: 'docker' is not kubernetes, kubelet or auto"),
        (["--demo", "--pod-source", "auto"], {}, "--pod-source auto: the kubelet of a simulated node has no Pods API"),
        (["--node-name", "n", "--pod-source", "kubelet", "--dra"], {}, "--dra and --pod-source kubelet: ResourceSlices"),
        ([], {}, "--node-name: not given, and NODE_NAME is not set"),
        ([*NODE, "--kubeconfig", "/nope"], {}, "--kubeconfig: '/nope' is not a file that is there"),
        (["--colour"], {}, "unrecognized arguments: --colour; --help says which flags and commands there are"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(arguments, environment, says):
    with pytest.raises(ConfigError) as caught:
        parse_config(arguments, environment)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30.0), ("2m", 120.0), ("1h", 3600.0), ("7", 7.0), ("0s", 0.0)])
def test_a_time_has_a_unit(text, seconds):
    assert parse_config(["--scenario", "x", "--once", "--at", text], {}).at_seconds == seconds


def test_what_kubernetes_sets_beside_a_service_is_no_flag():
    environment = {"FGPU_PORT": "tcp://10.96.1.2:9844", "FGPU_SERVICE_HOST": "10.96.1.2", "FGPU_PORT_9844_TCP": "tcp://10.96.1.2:9844"}
    assert parse_config(NODE, environment).port == 9844
    assert unknown_variables(environment) == ()


def test_a_misspelt_variable_is_named():
    assert unknown_variables({"FGPU_PROT": "1", "FGPU_PORT": "1", "HOME": "/"}) == ("FGPU_PROT",)


def test_a_log_level_may_be_written_in_capitals():
    assert parse_config([*NODE, "--log-level", "WARNING"], {}).log_level == "warning"


def test_the_flags_have_names_of_their_own():
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)
