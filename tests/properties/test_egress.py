"""The egress check: whatever a name resolves to, nothing inside our own network is reached that was not listed."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.base.egress import Allow, EgressRefused, Permit, Unresolved, base_url, check, parse_allow

PUBLIC = "93.184.216.34"
NOTHING = Allow()
FORBIDDEN = [
    "127.0.0.1", "127.8.8.8", "10.0.0.1", "172.16.3.4", "192.168.1.1", "100.64.0.1", "0.0.0.0", "169.254.169.254",
    "169.254.1.1", "224.0.0.1", "255.255.255.255", "100.100.100.200", "168.63.129.16", "::1", "::",
    "fe80::1", "fc00::1",
    "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::", "2002:a9fe:a9fe::", "::ffff:10.0.0.1", "2001:db8::1",
]  # fmt: skip
NEVER = [
    "169.254.169.254",
    "fd00:ec2::254",
    "168.63.129.16",
    "fe80::1",
    "0.0.0.0",
    "::",
    "224.0.0.1",
    "64:ff9b::a9fe:a9fe",
]
addresses = st.ip_addresses().map(str)


def to(*found: str) -> object:
    return lambda _host, _port: list(found)


def test_a_public_host_is_pinned_to_the_addresses_that_were_checked() -> None:
    asked: list[tuple[str, int]] = []

    def resolve(host: str, port: int) -> Sequence[str]:
        asked.append((host, port))
        return [PUBLIC, PUBLIC, "2606:2800:220:1::1"]

    permit = check("https://API.example.com/v1", NOTHING, resolve)
    assert permit == Permit("https", "api.example.com", 443, (PUBLIC, "2606:2800:220:1::1"))
    assert asked == [("api.example.com", 443)]


@pytest.mark.parametrize("address", FORBIDDEN)
def test_no_address_of_our_own_network_is_reached(address: str) -> None:
    with pytest.raises(EgressRefused):
        check("https://innocent.example.com", NOTHING, to(address))
    with pytest.raises(EgressRefused):  # one bad one among good ones is how rebinding begins
        check("https://innocent.example.com", NOTHING, to(PUBLIC, address))


@pytest.mark.parametrize("address", NEVER)
def test_what_is_never_called_cannot_be_allowed(address: str) -> None:
    allow = parse_allow("0.0.0.0/0,::/0,inner.example.com")
    for url in ("https://inner.example.com", "http://inner.example.com"):
        with pytest.raises(EgressRefused, match="never called"):
            check(url, allow, to(address))


@given(st.lists(addresses, min_size=1, max_size=5))
def test_every_pinned_address_is_global_where_nothing_is_allowed(found: list[str]) -> None:
    try:
        permit = check("https://any.example.com", NOTHING, to(*found))
    except EgressRefused as error:
        assert str(error)
        return
    assert set(permit.addresses) == set(found)
    for text in permit.addresses:
        address = ipaddress.ip_address(text)
        assert not (address.is_private or address.is_loopback or address.is_link_local or address.is_multicast)


@given(st.lists(addresses, min_size=1, max_size=3), st.sampled_from(["10.0.0.0/8", "127.0.0.0/8", "fc00::/7"]))
def test_an_allowed_network_lets_in_its_own_addresses_and_no_others(found: list[str], network: str) -> None:
    def passes(allow: Allow) -> bool:
        try:
            return bool(check("https://any.example.com", allow, to(*found)))
        except EgressRefused:
            return False

    inside = [ipaddress.ip_address(text) in ipaddress.ip_network(network) for text in found]
    if passes(parse_allow(network)) and not passes(NOTHING):
        assert any(inside)
    if not any(inside):
        assert passes(parse_allow(network)) == passes(NOTHING)


def test_http_is_for_listed_hosts_and_networks_only() -> None:
    with pytest.raises(EgressRefused, match="use https"):
        check("http://api.example.com", NOTHING, to(PUBLIC))
    assert check("http://api.example.com", parse_allow("api.example.com"), to(PUBLIC)).port == 80
    assert check("http://127.0.0.1:9000", parse_allow("127.0.0.0/8"), to("127.0.0.1")).port == 9000
    assert check("http://[::1]:9000/x", parse_allow("[::1]"), to("::1")).host == "::1"
    with pytest.raises(EgressRefused):
        check("http://localhost:9000", parse_allow("127.0.0.1"), to("127.0.0.1", "10.0.0.1"))


@pytest.mark.parametrize(
    "url",
    [
        "", "ftp://x.example.com", "https://", "https://:443", "https://user:secret@x.example.com",
        "https://x@127.0.0.1",
        "https://x.example.com/?a=b", "https://x.example.com/#a", "https://x.example.com:0",
        "https://x.example.com:99999",
        "https://x.example.com /", "https://x.example.com\n", "https://x.example.com\\@127.0.0.1",
        "https://bücher.example",
        "file:///etc/passwd", "//x.example.com", "https://[::1", "https://-x-.example.com", "https://x..example.com",
        "https://" + "a" * 300,
    ],
)  # fmt: skip
def test_what_is_no_plain_address_is_refused_before_a_name_is_looked_up(url: str) -> None:
    def resolve(_host: str, _port: int) -> Sequence[str]:
        raise AssertionError("looked up")

    with pytest.raises(EgressRefused) as caught:
        check(url, parse_allow("0.0.0.0/0,::/0"), resolve)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["https://0x7f.1", "https://2130706433", "https://127.1", "https://0177.0.0.1"])
def test_an_odd_spelling_of_an_address_is_judged_by_what_it_resolves_to(url: str) -> None:
    with pytest.raises(EgressRefused, match="loopback"):
        check(url, NOTHING, to("127.0.0.1"))


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_refused_with_a_reason(text: str) -> None:
    for url in (text, "https://" + text):
        try:
            assert check(url, NOTHING, to(PUBLIC)).addresses == (PUBLIC,)
        except EgressRefused as error:
            assert str(error)


def test_a_host_without_an_address_may_have_one_later() -> None:
    def fail(_host: str, _port: int) -> Sequence[str]:
        raise OSError("Name or service not known")

    for resolve in (fail, to()):
        with pytest.raises(Unresolved, match=r"x\.example\.com"):
            check("https://x.example.com", NOTHING, resolve)


@pytest.mark.parametrize(
    ("given_url", "kept"),
    [
        ("https://API.example.com/v1/", "https://api.example.com"),
        ("https://api.example.com", "https://api.example.com"),
        ("https://api.example.com/openai/v1", "https://api.example.com/openai"),
        ("http://127.0.0.1:9000/v1", "http://127.0.0.1:9000"),
    ],
)
def test_a_base_url_has_one_spelling(given_url: str, kept: str) -> None:
    assert base_url(given_url) == kept


@pytest.mark.parametrize("text", ["10.0.0.1/8", "a b", "http://x", "x/24", "*.example.com"])
def test_an_entry_that_is_neither_host_nor_network_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="neither"):
        parse_allow(text)
