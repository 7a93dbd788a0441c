use super::*;

fn refused(egress: &Egress, address: &str) -> Forbidden {
    egress.check(address.parse().unwrap()).unwrap_err()
}

fn allowed(egress: &Egress, address: &str) {
    egress.check(address.parse().unwrap()).unwrap();
}

#[test]
fn some_addresses_are_never_called_whatever_is_allowed() {
    let everything = Egress {
        networks: vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()],
        ..Egress::default()
    };
    for address in [
        "169.254.169.254:80",
        "169.254.7.7:30000",
        "100.100.100.200:80",
        "192.0.0.192:8080",
        "[fd00:ec2::254]:80",
        "[fd20:ce::254]:3000",
        "[64:ff9b:1::a9fe:a9fe]:80",
        "[::ffff:0:169.254.169.254]:80",
        "[2001:0:1:2:3:4:80ff:fffe]:30000",
        "[fec0::1]:30000",
        "240.0.0.1:30000",
        "[fe80::1]:30000",
        "[::ffff:169.254.169.254]:80",
        "[64:ff9b::a9fe:a9fe]:80",
        "[2002:a9fe:a9fe::1]:80",
        "[::169.254.169.254]:80",
        "224.0.0.1:30000",
        "[ff02::1]:30000",
        "255.255.255.255:1",
        "0.0.0.0:30000",
        "0.1.2.3:30000",
        "[::]:30000",
    ] {
        let why = refused(&everything, address);
        assert!(matches!(why, Forbidden::Never(..)), "{address}: {why}");
    }
    for address in ["10.1.2.3:30000", "127.0.0.1:30000", "[2001:db8::1]:1"] {
        allowed(&everything, address);
    }
}

#[test]
fn loopback_is_called_only_where_it_is_allowed_in_any_writing() {
    let closed = Egress {
        loopback: false,
        ..Egress::default()
    };
    for address in [
        "127.0.0.1:30000",
        "127.9.9.9:30000",
        "[::1]:30000",
        "[::ffff:127.0.0.1]:30000",
        "[64:ff9b::7f00:1]:30000",
        "[64:ff9b:1::7f00:1]:30000",
        "[::ffff:0:127.0.0.1]:30000",
    ] {
        let why = refused(&closed, address);
        assert!(matches!(why, Forbidden::Loopback(_)), "{address}: {why}");
        allowed(&Egress::default(), address);
    }
    let named = Egress {
        networks: vec!["127.0.0.0/8".parse().unwrap()],
        ..closed
    };
    allowed(&named, "127.0.0.1:30000");
    allowed(&named, "[::ffff:127.0.0.1]:30000");
    assert!(matches!(
        refused(&named, "10.0.0.1:30000"),
        Forbidden::Network(_)
    ));
}

#[test]
fn ports_networks_and_own_addresses() {
    let egress = Egress {
        networks: vec!["10.0.0.0/8".parse().unwrap(), "fd12::/16".parse().unwrap()],
        ports: vec![8000..=8099, 30000..=30000],
        loopback: true,
        own: vec![
            "0.0.0.0:8001".parse().unwrap(),
            "10.0.0.9:8002".parse().unwrap(),
        ],
        ..Egress::default()
    };
    allowed(&egress, "10.0.0.1:8000");
    allowed(&egress, "[fd12::7]:30000");
    assert_eq!(refused(&egress, "10.0.0.1:22"), Forbidden::Port(22));
    assert!(matches!(
        refused(&egress, "11.0.0.1:8000"),
        Forbidden::Network(_)
    ));
    assert!(matches!(
        refused(&egress, "10.0.0.9:8002"),
        Forbidden::Own(_)
    ));
    assert!(matches!(
        refused(&egress, "127.0.0.1:8001"),
        Forbidden::Own(_)
    ));
    allowed(&egress, "127.0.0.1:8002");
}

#[test]
fn who_listens_on_all_interfaces_has_all_addresses_of_the_machine() {
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    let here = |asked: IpAddr| [ip("10.0.0.9"), ip("fd12::9")].contains(&asked);
    for wildcard in ["0.0.0.0:7700", "[::]:7700"] {
        let egress = Egress {
            own: vec![wildcard.parse().unwrap(), "10.0.0.9:7701".parse().unwrap()],
            ..Egress::default()
        };
        let own = |text: &str, port| egress.is_own(ip(text), port, here);
        for text in ["10.0.0.9", "fd12::9", "127.0.0.1", "127.8.8.8", "::1"] {
            assert!(own(text, 7700), "{text}");
            // An engine beside it.
            assert!(!own(text, 30000), "{text}");
        }
        // An engine elsewhere, on the same port.
        assert!(!own("10.0.0.8", 7700));
        assert!(own("10.0.0.9", 7701));
        assert!(!own("fd12::9", 7701));
        // What this machine says of itself is asked for, in any writing.
        let all = if_addrs::get_if_addrs().unwrap();
        assert!(!all.is_empty());
        for one in all.iter().map(if_addrs::Interface::ip) {
            let refused = egress.check(SocketAddr::new(one, 7700)).unwrap_err();
            let never = never(one).is_some();
            assert!(never || matches!(refused, Forbidden::Own(_)), "{refused}");
            if let IpAddr::V4(v4) = one {
                let mapped = SocketAddr::new(v4.to_ipv6_mapped().into(), 7700);
                assert!(egress.check(mapped).is_err(), "{mapped}");
            }
            let beside = egress.check(SocketAddr::new(one, 30000));
            assert!(never || beside.is_ok(), "{one}: {beside:?}");
        }
        // 203.0.113.0/24 is for documents only: it is nobody's.
        allowed(&egress, "203.0.113.99:7700");
    }
}

#[test]
fn a_name_with_a_good_and_a_bad_address_is_refused() {
    let egress = Egress::default();
    let good: SocketAddr = "10.0.0.1:30000".parse().unwrap();
    let bad: SocketAddr = "169.254.169.254:30000".parse().unwrap();
    egress.check_all("name", &[good]).unwrap();
    for addresses in [[good, bad], [bad, good]] {
        let why = egress.check_all("name", &addresses).unwrap_err();
        assert!(matches!(why, Forbidden::Never(..)), "{why}");
    }
    let none = egress.check_all("name", &[]).unwrap_err();
    assert!(matches!(none, Forbidden::Unresolved(..)));
    let many = egress
        .check_all("name", &[good; MAX_ADDRESSES + 1])
        .unwrap_err();
    assert!(matches!(many, Forbidden::Unresolved(..)));
}

#[tokio::test]
async fn a_number_is_checked_without_a_name_server() {
    let closed = Egress {
        loopback: false,
        ..Egress::default()
    };
    for url in [
        "http://127.0.0.1:1",
        "http://[::1]:30000",
        "http://[::ffff:7f00:1]:80",
    ] {
        let why = closed.check_url(url, Duration::from_secs(1)).await;
        assert!(matches!(why, Err(Forbidden::Loopback(_))), "{url}: {why:?}");
    }
    let why = closed
        .check_url("http://localhost:80", Duration::from_secs(5))
        .await;
    assert!(matches!(why, Err(Forbidden::Loopback(_))), "{why:?}");
}

#[tokio::test]
async fn a_name_that_came_to_mean_berth_itself_is_not_spoken_to() {
    use crate::engine::http::{HttpClient, HttpConfig, HttpError};
    use tokio::{io::AsyncReadExt as _, net::TcpListener};

    let own = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let engine = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = |of: &TcpListener| of.local_addr().unwrap().port();
    let egress = Egress {
        hosts: BTreeMap::from([("engine.test".to_owned(), vec![Ipv4Addr::LOCALHOST.into()])]),
        own: vec![own.local_addr().unwrap()],
        ..Egress::default()
    };
    let http = HttpClient::within(HttpConfig::default(), Arc::new(egress));
    let ask = async |listener: &TcpListener| {
        let url = format!("http://engine.test:{}", port(listener));
        let answer = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.read(&mut [0; 64]).await.unwrap_or(0)
        };
        let limit = Duration::from_secs(30);
        let asked = http.call(http::Method::GET, &url, "/health", None, 1 << 10, limit);
        tokio::join!(asked, answer)
    };
    let (refused, heard) = ask(&own).await;
    let Err(HttpError::Refused(why)) = refused else {
        panic!("{refused:?}");
    };
    assert!(why.contains("own address"), "{why}");
    assert_eq!(heard, 0);
    let (_, heard) = ask(&engine).await;
    assert!(heard > 0, "an engine beside it is");
}
