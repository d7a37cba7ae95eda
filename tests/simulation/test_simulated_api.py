import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from exporter.clock import SystemClock

CAPTURES = Path(__file__).parents[1] / "captures"

NODE = """
    node:
      name: n
      labels: {nvidia.com/gpu.memory: "81559"}
      annotations: {a: b}
      allocatable: {aliyun.com/gpu-mem: "640"}
    pods:
      - metadata: {name: p, namespace: team-a, labels: {x: "1"}}
        spec: {nodeName: n, containers: [{name: c}]}
        status: {phase: Running}
      - metadata: {name: elsewhere, namespace: team-a}
        spec: {nodeName: other}
      - {apiVersion: v1, kind: Pod, metadata: {name: pending}}
    resource_slices:
      - {metadata: {name: s}, spec: {nodeName: n, driver: gpu.nvidia.com}}
      - {metadata: {name: t}, spec: {nodeName: other, driver: gpu.nvidia.com}}
    resource_claims:
      - {metadata: {name: c, namespace: team-a}, spec: {}}
"""
HERE = "fieldSelector=spec.nodeName%3Dn"


def get(node, path):
    with urllib.request.urlopen(f"{node.kubernetes_url}{path}", timeout=10) as response:  # noqa: S310 - http on loopback
        return json.load(response)


def refusal(node, path):
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(node, path)
    with caught.value as error:
        return error.code, json.load(error)


class Watch:
    """A watch that is read line by line."""

    def __init__(self, node, path):
        separator = "&" if "?" in path else "?"
        self.response = urllib.request.urlopen(f"{node.kubernetes_url}{path}{separator}watch=true", timeout=10)  # noqa: S310 - http on loopback

    def event(self):
        """Answer the type, name and object of the next event; None at the end."""
        line = self.response.readline()
        if not line:
            return None
        event = json.loads(line)
        return event["type"], event["object"]["metadata"].get("name"), event["object"]

    def events(self):
        """Answer the types and names of what comes up to the next bookmark."""
        seen = []
        while (event := self.event()) and event[0] != "BOOKMARK":
            seen.append(event[:2])
        return seen


@pytest.fixture
def watch():
    """Answer a function that opens a watch, with bookmarks, and closes it in the end."""
    opened = []

    def open_watch(node, path, version=None):
        version = version or get(node, path)["metadata"]["resourceVersion"]
        separator = "&" if "?" in path else "?"
        opened.append(Watch(node, f"{path}{separator}allowWatchBookmarks=true&resourceVersion={version}"))
        return opened[-1]

    yield open_watch
    for each in opened:
        each.response.close()


def test_a_list_has_the_shape_of_a_real_one(start):
    answer = get(start(NODE), f"/api/v1/pods?{HERE}&resourceVersion=0")
    real = json.loads((CAPTURES / "pods-list.json").read_text())
    assert answer.keys() == real.keys()
    assert (answer["kind"], answer["apiVersion"]) == ("PodList", "v1")
    (pod,) = answer["items"]
    assert pod.keys() == real["items"][0].keys()
    assert int(pod["metadata"]["resourceVersion"]) <= int(answer["metadata"]["resourceVersion"])
    assert pod["metadata"] == {
        "name": "p", "namespace": "team-a", "labels": {"x": "1"}, "creationTimestamp": "2026-01-01T00:00:00Z",
        "uid": pod["metadata"]["uid"], "resourceVersion": pod["metadata"]["resourceVersion"],
    }  # fmt: skip
    assert len(pod["metadata"]["uid"]) == 36


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/api/v1/pods", ["p", "elsewhere", "pending"]),
        ("/api/v1/pods?fieldSelector=", ["p", "elsewhere", "pending"]),
        ("/api/v1/pods?fieldSelector=spec.nodeName=other", ["elsewhere"]),
        ("/api/v1/pods?fieldSelector=spec.nodeName!=n", ["elsewhere", "pending"]),
        ("/api/v1/pods?fieldSelector=spec.nodeName==n,status.phase=Failed", []),
        ("/api/v1/pods?fieldSelector=metadata.namespace=default", ["pending"]),
        ("/api/v1/nodes?fieldSelector=metadata.name=n", ["n"]),
        ("/api/v1/nodes?fieldSelector=metadata.name=other", []),
        ("/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.nodeName=n,spec.driver=gpu.nvidia.com", ["s"]),
        ("/apis/resource.k8s.io/v1/resourceclaims", ["c"]),
    ],
)
def test_field_selectors_are_honoured(start, path, names):
    assert [item["metadata"]["name"] for item in get(start(NODE), path)["items"]] == names


def test_one_object_can_be_asked_for(start):
    node = start(NODE)
    answer = get(node, "/api/v1/nodes/n")
    assert (answer["kind"], answer["apiVersion"]) == ("Node", "v1")
    assert answer["metadata"]["labels"] == {"nvidia.com/gpu.memory": "81559"}
    assert answer["metadata"]["annotations"] == {"a": "b"}
    assert answer["status"]["allocatable"] == {"aliyun.com/gpu-mem": "640"}
    assert get(node, "/api/v1/namespaces/team-a/pods/p")["status"] == {"phase": "Running"}
    claim = get(node, "/apis/resource.k8s.io/v1/namespaces/team-a/resourceclaims/c")
    assert (claim["kind"], claim["apiVersion"]) == ("ResourceClaim", "resource.k8s.io/v1")


def test_what_is_not_there_is_a_status(start):
    code, status = refusal(start(NODE), "/api/v1/nodes/m")
    assert code == status["code"] == 404
    assert (status["kind"], status["reason"], status["message"]) == ("Status", "NotFound", 'nodes "m" not found')
    assert status["details"] == {"name": "m", "kind": "nodes"}


def test_other_versions_and_other_kinds_are_not_served(start):
    node = start(NODE)
    assert refusal(node, "/apis/resource.k8s.io/v1beta1/resourceslices")[0] == 404
    code, status = refusal(node, "/api/v1/secrets")
    real = json.loads((CAPTURES / "forbidden.json").read_text())
    assert (code, status["reason"], status.keys()) == (403, real["reason"], real.keys())
    assert refusal(node, "/api/v1/pods?fieldSelector=spec.hostNetwork=true")[0] == 400
    assert refusal(node, "/api/v1/pods?labelSelector=a")[0] == 400
    assert refusal(node, "/api/v1/pods?resourceVersion=x")[0] == 400


def test_a_version_that_has_not_been_reached_is_a_time_out(start):
    node = start(NODE)
    code, status = refusal(node, "/api/v1/pods?resourceVersion=99999999")
    real = json.loads((CAPTURES / "list-too-large.json").read_text())
    current = get(node, "/api/v1/pods")["metadata"]["resourceVersion"]
    assert code == 504
    assert status == {**real, "message": f"Timeout: Too large resource version: 99999999, current: {current}"}


def test_a_watch_tells_what_changes_and_then_that_this_was_all(start, watch):
    node = start(
        NODE
        + """
    timeline:
      - at: 5s
        pods:
          - {metadata: {name: p, namespace: team-a, labels: {x: "2"}}}
          - {metadata: {name: pending}, spec: {nodeName: n}}
          - {metadata: {name: new}, spec: {nodeName: n}}
      - at: 9s
        remove: {pods: [team-a/p, team-a/elsewhere]}
        pods: [{metadata: {name: new}, spec: {nodeName: other}}]
    """
    )
    pods = watch(node, f"/api/v1/pods?{HERE}")
    assert pods.events() == []
    node.advance_to(5)
    kind, _, changed = pods.event()
    assert (kind, changed["kind"], changed["apiVersion"], changed["metadata"]["labels"]) == ("MODIFIED", "Pod", "v1", {"x": "2"})
    assert pods.events() == [("ADDED", "pending"), ("ADDED", "new")]
    node.advance_to(9)
    kind, name, gone = pods.event()
    assert (kind, name) == ("DELETED", "p")
    assert gone["metadata"]["labels"] == {"x": "2"}
    assert int(gone["metadata"]["resourceVersion"]) > int(changed["metadata"]["resourceVersion"])
    assert pods.events() == [("DELETED", "new")]


def test_a_bookmark_has_the_shape_of_a_real_one(start, watch):
    (kind, _, bookmark) = watch(start(NODE), "/api/v1/pods").event()
    real = json.loads((CAPTURES / "watch.jsonl").read_text().splitlines()[-1])
    assert (kind, {**bookmark, "metadata": {}}) == ("BOOKMARK", {**real["object"], "metadata": {}})
    assert bookmark["metadata"].keys() == {"resourceVersion"}


def test_a_pod_that_is_made_again_under_its_name_is_deleted_first(start, watch):
    node = start(NODE + "    timeline: [{at: 5s, pods: [{metadata: {name: p, namespace: team-a, uid: another}}]}]")
    pods = watch(node, f"/api/v1/pods?{HERE}")
    pods.events()
    node.advance_to(5)
    kind, _, gone = pods.event()
    assert kind == "DELETED"
    kind, _, new = pods.event()
    assert kind == "ADDED"
    assert (gone["metadata"]["uid"] != "another", new["metadata"]["uid"]) == (True, "another")


def test_the_node_object_is_watched_like_any_other(start, watch):
    node = start(NODE + '    timeline: [{at: 5s, node: {labels: {nvidia.com/gpu.replicas: "4"}}}]')
    nodes = watch(node, "/api/v1/nodes?fieldSelector=metadata.name=n")
    nodes.events()
    node.advance_to(5)
    kind, _, changed = nodes.event()
    assert kind == "MODIFIED"
    assert changed["metadata"]["labels"] == {"nvidia.com/gpu.memory": "81559", "nvidia.com/gpu.replicas": "4"}


def test_a_watch_without_a_version_begins_with_what_is_there(start):
    node = start(NODE)
    response = Watch(node, "/apis/resource.k8s.io/v1/resourceslices")
    with response.response:
        assert [response.event()[:2], response.event()[:2]] == [("ADDED", "s"), ("ADDED", "t")]


def test_a_watch_goes_on_from_the_version_it_names(start, watch):
    node = start(NODE + "    timeline: [{at: 5s, remove: {pods: [team-a/p]}}]")
    version = get(node, "/api/v1/pods")["metadata"]["resourceVersion"]
    node.advance_to(5)
    assert watch(node, "/api/v1/pods", version).events() == [("DELETED", "p")]


def test_a_watch_ends_when_its_time_is_over(start):
    node = start(NODE)
    short = Watch(node, "/api/v1/pods?resourceVersion=0&timeoutSeconds=300")
    with short.response:
        for _ in range(3):
            short.event()
        node.advance_to(299)
        node.advance_to(300)
        assert short.event() is None


def test_gone_ends_open_watches_with_an_error_and_older_versions_are_gone(start, watch):
    node = start(NODE + "    timeline: [{at: 5s, sources: {kubernetes: gone}}]")
    version = get(node, "/api/v1/pods")["metadata"]["resourceVersion"]
    pods = watch(node, "/api/v1/pods", version)
    pods.events()
    node.advance_to(5)
    real = json.loads((CAPTURES / "watch-expired.json").read_text())
    for expired in (pods, watch(node, "/api/v1/pods", version)):
        kind, _, status = expired.event()
        assert kind == real["type"]
        assert status == {**real["object"], "message": status["message"]}
        assert status["message"].startswith("too old resource version: ")
        assert expired.event() is None
    assert watch(node, "/api/v1/pods").events() == []


def test_an_api_that_is_down_refuses_connections_and_comes_back_on_the_same_port(start, watch):
    node = start(NODE + "    timeline: [{at: 5s, sources: {kubernetes: down}}, {at: 9s, sources: {kubernetes: up}}]")
    pods = watch(node, "/api/v1/pods")
    pods.events()
    node.advance_to(5)
    with pytest.raises(http.client.IncompleteRead):
        pods.response.read()
    with pytest.raises(urllib.error.URLError, match="Connection refused"):
        get(node, "/api/v1/pods")
    node.advance_to(9)
    assert len(get(node, "/api/v1/pods")["items"]) == 3


def test_refused_credentials_end_open_watches(start, watch):
    node = start(NODE + "    timeline: [{at: 5s, sources: {kubernetes: unauthorized}}]")
    pods = watch(node, "/api/v1/pods")
    pods.events()
    node.advance_to(5)
    assert pods.event() is None
    code, status = refusal(node, "/api/v1/pods")
    assert (code, status) == (401, json.loads((CAPTURES / "unauthorized.json").read_text()))


HANGS = (
    NODE
    + """
    timeline:
      - {at: 5s, sources: {kubernetes: hang}, remove: {pods: [team-a/p]}}
      - {at: 200s, sources: {kubernetes: up}}
"""
)


def answer_in_background(node, path):
    answers = []

    def ask():
        try:
            answers.append(get(node, path))
        except OSError as error:
            answers.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, answers


def test_an_api_that_hangs_is_silent_and_its_clients_lose_patience(start, watch):
    node = start(HANGS)
    pods = watch(node, "/api/v1/pods")
    pods.events()
    node.advance_to(5)
    pods.response.fp.raw._sock.settimeout(0.05)
    with pytest.raises(TimeoutError):
        pods.event()
    thread, answers = answer_in_background(node, "/api/v1/pods")
    thread.join(0.05)
    assert thread.is_alive()
    node.advance_to(15)
    thread.join(10)
    assert isinstance(answers[0], OSError)
    node.advance_to(65)
    raw = pods.response.fp.raw._sock
    raw.settimeout(10)
    assert raw.recv(1) == b""


def test_an_api_that_hung_goes_on_where_it_was(start, watch):
    node = start(HANGS, SystemClock())
    pods = watch(node, "/api/v1/pods")
    pods.events()
    node.advance_to(199)
    thread, answers = answer_in_background(node, "/api/v1/pods")
    thread.join(0.05)
    assert thread.is_alive()
    node.advance_to(200)
    thread.join(10)
    assert len(answers[0]["items"]) == 2
    assert pods.events() == [("DELETED", "p")]


def test_a_watch_is_told_a_bookmark_a_minute(start, watch):
    node = start(NODE)
    pods = watch(node, "/api/v1/pods")
    first = pods.event()
    node.advance_to(60)
    second = pods.event()
    assert (first[0], second[0]) == ("BOOKMARK", "BOOKMARK")
    assert int(second[2]["metadata"]["resourceVersion"]) > int(first[2]["metadata"]["resourceVersion"])


def test_one_connection_can_carry_several_requests(start):
    node = start(NODE)
    host, _, port = node.kubernetes_url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        reader = connection.makefile("rb")
        for _ in range(2):
            connection.sendall(b"GET /api/v1/nodes/n HTTP/1.1\r\nHost: x\r\n\r\n")
            assert reader.readline() == b"HTTP/1.1 200 OK\r\n"
            headers = iter(reader.readline, b"\r\n")
            length = next(int(line.split(b":")[1]) for line in list(headers) if line.lower().startswith(b"content-length"))
            assert json.loads(reader.read(length))["metadata"]["name"] == "n"
        reader.close()


# --- events ---

EVENT = {"metadata": {"name": "p.1"}, "involvedObject": {"namespace": "team-a", "name": "p", "uid": "u"}, "reason": "R", "count": 1}
EVENTS = "/api/v1/namespaces/team-a/events"


def write(node, method, path, body):
    """Answer the status and the object of a write."""
    address = node.kubernetes_url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request(method, path, body if isinstance(body, str) else json.dumps(body))
        answer = connection.getresponse()
        return answer.status, json.load(answer)
    finally:
        connection.close()


def test_an_event_that_is_made_can_be_read_and_changed(start):
    node = start(NODE)
    code, made = write(node, "POST", EVENTS, EVENT)
    assert (code, made["kind"], made["apiVersion"], made["metadata"]["namespace"]) == (201, "Event", "v1", "team-a")
    code, changed = write(node, "PATCH", f"{EVENTS}/p.1", {"count": 2})
    assert (code, changed["count"], changed["reason"]) == (200, 2, "R")
    assert int(changed["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])
    assert get(node, f"{EVENTS}/p.1") == changed
    assert len(get(node, "/api/v1/events?fieldSelector=involvedObject.name=p,involvedObject.uid=u")["items"]) == 1
    assert get(node, "/api/v1/events?fieldSelector=involvedObject.uid=v")["items"] == []


@pytest.mark.parametrize(
    ("method", "path", "body", "code", "reason"),
    [
        ("POST", EVENTS, EVENT, 409, "AlreadyExists"),
        ("PATCH", f"{EVENTS}/p.2", {"count": 2}, 404, "NotFound"),
        ("POST", "/api/v1/namespaces/team-b/events", EVENT, 422, "Invalid"),
        ("POST", EVENTS, {"metadata": {}}, 422, "Invalid"),
        ("POST", EVENTS, "{", 400, "BadRequest"),
        ("POST", EVENTS, "[]", 400, "BadRequest"),
        ("POST", "/api/v1/namespaces/team-a/pods", EVENT, 405, "MethodNotAllowed"),
        ("PATCH", "/api/v1/namespaces/team-a/pods/p", {}, 405, "MethodNotAllowed"),
    ],
)
def test_a_write_that_cannot_be_is_refused_as_an_api_server_does(start, method, path, body, code, reason):
    node = start(NODE)
    write(node, "POST", EVENTS, EVENT)
    answered, status = write(node, method, path, body)
    assert (answered, status["reason"], status["code"]) == (code, reason, code)
    assert len(get(node, "/api/v1/events")["items"]) == 1


def test_events_are_watched_as_anything_else(start, watch):
    node = start(NODE)
    followed = watch(node, "/api/v1/events")
    assert followed.events() == []
    write(node, "POST", EVENTS, EVENT)
    assert followed.events() == [("ADDED", "p.1")]
    write(node, "PATCH", f"{EVENTS}/p.1", {"count": 2})
    assert followed.events() == [("MODIFIED", "p.1")]


def test_the_oldest_events_go_when_there_are_too_many(start):
    node = start(NODE)
    for number in range(1003):
        node._api.create_event("team-a", {**EVENT, "metadata": {"name": f"p.{number}"}})
    names = [item["metadata"]["name"] for item in get(node, "/api/v1/events")["items"]]
    assert (len(names), names[0], names[-1]) == (1000, "p.3", "p.1002")


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/api/v1/namespaces/team-a/pods", ["p", "elsewhere"]),
        ("/api/v1/namespaces/team-a/pods?fieldSelector=spec.nodeName=other", ["elsewhere"]),
        ("/api/v1/namespaces/team-b/pods", []),
        ("/apis/resource.k8s.io/v1/namespaces/team-a/resourceclaims", ["c"]),
    ],
)
def test_a_list_can_be_of_one_namespace(start, path, names):
    assert [item["metadata"]["name"] for item in get(start(NODE), path)["items"]] == names


def test_what_there_is_can_be_discovered(start):
    node = start(NODE)
    assert get(node, "/api")["versions"] == ["v1"]
    assert [group["name"] for group in get(node, "/apis")["groups"]] == ["resource.k8s.io"]
    resources = get(node, "/api/v1")["resources"]
    assert {each["name"]: each["namespaced"] for each in resources} == {"pods": True, "nodes": False, "events": True}
    assert [each["kind"] for each in get(node, "/apis/resource.k8s.io/v1")["resources"]] == ["ResourceSlice", "ResourceClaim"]
