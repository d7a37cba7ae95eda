import asyncio
from base64 import b64encode
from types import MappingProxyType

import bcrypt
import pytest

from exporter.access import Access, Verdict
from exporter.web_config import RateLimit, WebConfig

ALLOWED, NO_PASSWORD, TOO_MANY = Verdict.ALLOWED, Verdict.NO_PASSWORD, Verdict.TOO_MANY_PASSWORDS


def basic(user, password):
    return "Basic " + b64encode(f"{user}:{password}".encode()).decode()


def users(rounds=4, **passwords):
    return WebConfig(
        users=MappingProxyType({user: bcrypt.hashpw(password.encode(), bcrypt.gensalt(rounds)) for user, password in passwords.items()})
    )


async def judge(access, authorization="", address="10.0.0.1", certificate=None):
    return await access.judge(authorization=authorization, certificate=certificate, address=address)


@pytest.fixture
def hashings(monkeypatch):
    """How often bcrypt ran, and on what."""
    seen = []
    checkpw = bcrypt.checkpw

    def count(password, password_hash):
        seen.append(password)
        return checkpw(password, password_hash)

    monkeypatch.setattr(bcrypt, "checkpw", count)
    return seen


def test_without_users_everyone_passes():
    async def run():
        return await judge(Access(WebConfig()))

    assert asyncio.run(run()) is ALLOWED


@pytest.mark.parametrize(
    ("authorization", "verdict"),
    [
        (basic("alice", "secret"), ALLOWED),
        (basic("alice", "secret").replace("Basic", "bAsIc"), ALLOWED),
        (basic("zoë", "p:ä:ss"), ALLOWED),
        ("", NO_PASSWORD),
        (basic("alice", "Secret"), NO_PASSWORD),
        (basic("alice", ""), NO_PASSWORD),
        (basic("zoë", "secret"), NO_PASSWORD),
        (basic("bob", "secret"), NO_PASSWORD),
        (basic("", "secret"), NO_PASSWORD),
        (basic("alice", "secret\0"), NO_PASSWORD),
        (basic("alice", "x" * 100_000), NO_PASSWORD),
        ("Bearer secret", NO_PASSWORD),
        ("Basic", NO_PASSWORD),
        ("Basic YWxpY2U=", NO_PASSWORD),
        ("Basic !!!!", NO_PASSWORD),
        ("Basic \xff\xfe", NO_PASSWORD),
        ("Basic " + b64encode(b"\xff:secret").decode(), NO_PASSWORD),
    ],
)
def test_only_a_user_with_that_users_password_passes(authorization, verdict):
    async def run():
        return await judge(Access(users(alice="secret", zoë="p:ä:ss")), authorization)

    assert asyncio.run(run()) is verdict


def test_a_password_longer_than_bcrypt_sees_is_refused_even_where_its_start_is_right(hashings):
    async def run():
        return await judge(Access(users(alice="x" * 72)), basic("alice", "x" * 73))

    assert asyncio.run(run()) is NO_PASSWORD
    assert hashings == []


def test_what_was_found_out_of_a_password_is_not_asked_of_bcrypt_again(hashings):
    async def run():
        access = Access(users(alice="secret"))
        return [await judge(access, basic("alice", password)) for password in ("secret", "wrong") * 10]

    assert asyncio.run(run()) == [ALLOWED, NO_PASSWORD] * 10
    assert hashings == [b"secret", b"wrong"]


def test_scrapes_that_arrive_together_share_one_check(hashings):
    async def run():
        access = Access(users(alice="secret"))
        return await asyncio.gather(*(judge(access, basic("alice", "secret")) for _ in range(50)))

    assert asyncio.run(run()) == [ALLOWED] * 50
    assert hashings == [b"secret"]


def test_the_right_password_of_one_user_is_not_taken_for_another(hashings):
    same = users(alice="secret").users["alice"]

    async def run():
        access = Access(WebConfig(users=MappingProxyType({"a": same, "ab": same})))
        return [
            await judge(access, basic(*credentials))
            for credentials in (("a", "secret"), ("ab", "secret"), ("a", "bsecret"), ("abs", "ecret"))
        ]

    assert asyncio.run(run()) == [ALLOWED, ALLOWED, NO_PASSWORD, NO_PASSWORD]


def test_an_unknown_user_costs_a_check_like_a_known_one(hashings):
    async def run():
        return await judge(Access(users(alice="secret")), basic("bob", "secret"))

    assert asyncio.run(run()) is NO_PASSWORD
    assert hashings == [b"secret"]


def test_one_guesser_cannot_keep_another_address_from_being_checked(hashings):
    async def run():
        access = Access(users(alice="secret", rounds=6))
        guesses = [asyncio.create_task(judge(access, basic("alice", f"guess-{n}"))) for n in range(100)]
        await asyncio.sleep(0)
        scrape = await judge(access, basic("alice", "secret"), address="10.0.0.2")
        return scrape, await asyncio.gather(*guesses)

    scrape, guesses = asyncio.run(run())
    assert scrape is ALLOWED
    assert guesses == [NO_PASSWORD] * 4 + [TOO_MANY] * 96
    assert len(hashings) == 5


def test_guessers_at_many_addresses_wait_in_a_short_line(hashings):
    async def run():
        access = Access(users(alice="secret"))
        return await asyncio.gather(*(judge(access, basic("alice", f"guess-{n}"), address=f"10.0.1.{n}") for n in range(200)))

    assert asyncio.run(run()) == [NO_PASSWORD] * 32 + [TOO_MANY] * 168
    assert len(hashings) == 32


def test_guessing_costs_a_quarter_of_one_cpu_at_most(hashings):
    async def run():
        loop = asyncio.get_running_loop()
        access = Access(users(alice="secret", rounds=8))
        started = loop.time()
        for n in range(4):
            await judge(access, basic("alice", f"guess-{n}"))
        guessing = loop.time() - started
        started = loop.time()
        for _ in range(4):
            await loop.run_in_executor(None, bcrypt.checkpw, b"x", users(alice="x", rounds=8).users["alice"])
        return guessing / (loop.time() - started)

    # Hashing for the comparison takes as long as checking: twice the work of the guesses without their rests.
    assert asyncio.run(run()) > 1.3


def test_a_scraper_that_gives_up_finds_its_password_known_the_next_time(hashings):
    async def run():
        access = Access(users(alice="secret", rounds=8))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await judge(access, basic("alice", "secret"))
        await asyncio.sleep(0.3)
        return await judge(access, basic("alice", "secret"))

    assert asyncio.run(run()) is ALLOWED
    assert hashings == [b"secret"]


def test_no_more_refused_passwords_are_remembered_than_fit(hashings):
    async def run():
        access = Access(users(alice="secret"))
        for n in range(300):
            await judge(access, basic("alice", f"guess-{n}"))
        await judge(access, basic("alice", "secret"))
        assert await judge(access, basic("alice", "guess-299")) is NO_PASSWORD
        assert await judge(access, basic("alice", "guess-0")) is NO_PASSWORD
        return len(access._passwords._refused)

    assert asyncio.run(run()) == 256
    assert hashings[-2:] == [b"secret", b"guess-0"]


@pytest.mark.parametrize(
    ("certificate", "verdict"),
    [
        (None, Verdict.NO_CERTIFICATE),
        ({}, Verdict.NO_CERTIFICATE),
        ({"subject": ((("commonName", "prometheus"),),)}, Verdict.NO_CERTIFICATE),
        ({"subjectAltName": (("DNS", "other"), ("DNS", "prometheus"))}, ALLOWED),
        ({"subjectAltName": (("IP Address", "10.1.2.3"),)}, ALLOWED),
        ({"subjectAltName": (("URI", "spiffe://cluster/prometheus"),)}, ALLOWED),
        ({"subjectAltName": (("DNS", "prometheus.evil"),)}, Verdict.NO_CERTIFICATE),
    ],
)
def test_one_of_the_certificates_names_must_be_allowed(certificate, verdict):
    allowed = frozenset({"prometheus", "10.1.2.3", "spiffe://cluster/prometheus"})

    async def run():
        return await judge(Access(WebConfig(needs_client_certificate=True, client_allowed_sans=allowed)), certificate=certificate)

    assert asyncio.run(run()) is verdict


def test_the_rate_is_one_request_in_an_interval_and_a_burst():
    async def run():
        access = Access(WebConfig(rate_limit=RateLimit(interval_seconds=0.1, burst=3)))
        burst = [await judge(access) for _ in range(5)]
        await asyncio.sleep(0.15)
        return burst, [await judge(access) for _ in range(2)]

    assert asyncio.run(run()) == ([ALLOWED] * 3 + [Verdict.TOO_OFTEN] * 2, [ALLOWED, Verdict.TOO_OFTEN])
