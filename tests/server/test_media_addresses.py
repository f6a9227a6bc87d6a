import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.server.media.fetch import is_public, resolve_host

PUBLIC = ["1.1.1.1", "8.8.8.8", "93.184.216.34", "172.15.255.255", "172.32.0.0", "100.63.255.255", "100.128.0.0",
          "169.253.255.255", "192.0.1.1", "198.17.0.1", "223.255.255.255", "2606:4700::1111", "2a00:1450:4001::200e",
          "64:ff9b::808:808", "2002:808:808::1"]  # fmt: skip

NOT_PUBLIC = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.127.255.255", "127.0.0.1", "127.255.0.1",
    "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.8", "192.0.2.1", "192.88.99.1", "192.168.1.1",
    "198.18.0.1", "198.19.255.255", "198.51.100.7", "203.0.113.9", "224.0.0.1", "239.255.255.250", "240.0.0.1",
    "255.255.255.255",
    "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:8.8.8.8", "::ffff:0:127.0.0.1",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::808:808", "2002:7f00:1::1", "2002:a9fe:a9fe::1",
    "2002:a00:1::", "2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:2::1", "2001:10::1", "2001:db8::1",
    "3fff::1", "100::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "2606:4700::1111%1",
    "fec0::1", "ff02::1", "5f00::1", "4000::1",
    "", "localhost", "127.1", "2130706433", "0x7f.1", "1.1.1.1 ", "1.1.1.1/8",
]  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC)
def test_public(address):
    assert is_public(address)


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_not_public(address):
    assert not is_public(address)


@given(st.integers(0, 2**32 - 1))
def test_nothing_python_calls_special_is_public(number):
    """Its table is our witness; in one point it is laxer (relays of 6to4), and in none may it be stricter."""
    address = ipaddress.IPv4Address(number)
    special = address.is_private or address.is_multicast or address.is_reserved or address.is_loopback
    assert not (is_public(str(address)) and (special or address.is_link_local or address.is_unspecified))


@given(st.integers(0, 2**128 - 1))
def test_nothing_python_calls_special_is_public_v6(number):
    address = ipaddress.IPv6Address(number)
    assert not is_public(str(address)) or not (address.is_private or address.is_multicast or address.is_site_local)


@given(st.integers(0, 2**32 - 1))
def test_addresses_within_addresses_are_what_counts(number):
    inner = is_public(str(ipaddress.IPv4Address(number)))
    assert is_public(str(ipaddress.IPv6Address((0x64FF9B << 96) + number))) == inner
    assert is_public(str(ipaddress.IPv6Address((0x2002 << 112) + (number << 80) + 7))) == inner


@pytest.mark.parametrize("spelling", ["127.0.0.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0x7f.1"])
def test_odd_spellings_of_an_address_are_one_address(spelling):
    assert resolve_host(spelling, 80) == ["127.0.0.1"]
