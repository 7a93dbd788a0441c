//! TLS, clients' certificates, and their exchange.

use std::{
    net::{IpAddr, Ipv4Addr},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    time::{Duration, SystemTime},
};

use berth::{
    auth::{
        TlsConfig,
        client::{Access, cause, unsent},
    },
    config::Config,
    engine::sim::SimConfig,
    harness::playground,
    proto::{
        GetStatsRequest, fleet_service_client::FleetServiceClient,
        sampling_service_client::SamplingServiceClient,
    },
    server::Server,
};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, SanType};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tonic::{Code, Status};

use crate::world::{Load, SERVER_CA, World, eventually, reason, replace, request, token_of};

const TRAINER: &str = "spiffe://cluster/ns/rl/sa/trainer-a";
const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            issuer: Issuer::new(params, key),
            pem,
        }
    }

    /// Writes `NAME.pem` and `NAME.key`, as rotators do: nobody sees half a file.
    fn issue(&self, dir: &Path, name: &str, names: Vec<SanType>, lives: Duration) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.subject_alt_names = names;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = rcgen::date_time_ymd(1970, 1, 1) + now.unwrap();
        params.not_before = now - Duration::from_secs(60);
        params.not_after = now + lives;
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        replace(&dir.join(format!("{name}.pem")), &cert.pem());
        replace(&dir.join(format!("{name}.key")), &key.serialize_pem());
    }

    fn server(&self, dir: &Path) {
        let here = SanType::IpAddress(IpAddr::V4(Ipv4Addr::LOCALHOST));
        self.issue(dir, "server", vec![here], YEAR);
    }

    fn client(&self, dir: &Path, name: &str, uris: &[&str], lives: Duration) {
        let uris = uris.iter().map(|uri| uri_name(uri)).collect();
        self.issue(dir, name, uris, lives);
    }
}

fn uri_name(uri: &str) -> SanType {
    SanType::URI(uri.try_into().unwrap())
}

struct Bench {
    world: World,
    servers: Authority,
    clients: Authority,
}

impl Bench {
    async fn start(replicas: u32, change: impl FnOnce(&mut TlsConfig)) -> Self {
        let (servers, clients) = (Authority::new(), Authority::new());
        let world = World::with(replicas, SimConfig::instant(), |dir, config| {
            std::fs::write(dir.join(SERVER_CA), &servers.pem).unwrap();
            std::fs::write(dir.join("client-ca.pem"), &clients.pem).unwrap();
            servers.server(dir);
            let mut tls = tls(dir);
            change(&mut tls);
            config.auth.tls = Some(tls);
            let path = dir.join("credentials");
            let mut lines = std::fs::read_to_string(&path).unwrap();
            lines.push_str(&format!(
                "principal=trainer-a role=sample tenant=a uri={TRAINER}\n"
            ));
            std::fs::write(path, lines).unwrap();
        })
        .await;
        Self {
            world,
            servers,
            clients,
        }
    }

    /// A client with this certificate and no token.
    fn with(&self, name: &str) -> Access {
        let dir = self.world.dir.path();
        Access {
            token_file: None,
            tls_cert: Some(dir.join(format!("{name}.pem"))),
            tls_key: Some(dir.join(format!("{name}.key"))),
            ..token_of(dir, "nobody")
        }
    }

    async fn sample(&self, access: &Access) -> Result<(), Status> {
        let mut client = SamplingServiceClient::new(self.world.wire_with(access));
        client.sample(request(1, 2)).await.map(drop)
    }

    async fn refused(&self, access: &Access) -> String {
        let status = self.sample(access).await.unwrap_err();
        assert_eq!(status.code(), Code::Unauthenticated, "{status}");
        reason(&status)
    }
}

fn tls(dir: &Path) -> TlsConfig {
    TlsConfig {
        cert: dir.join("server.pem"),
        key: dir.join("server.key"),
        client_ca: Some(dir.join("client-ca.pem")),
        require_client_cert: false,
        handshake_timeout: Duration::from_secs(10),
        connection_age: Duration::from_secs(600),
    }
}

#[tokio::test]
async fn a_client_is_who_its_certificates_one_name_says() {
    // Its sidecar has a token, and no certificate.
    let bench = Bench::start(1, |_| {}).await;
    let dir = bench.world.dir.path();
    let make = |name: &str, uris: &[&str]| bench.clients.client(dir, name, uris, YEAR);
    make("good", &[TRAINER]);
    make("stranger", &["spiffe://cluster/ns/rl/sa/other"]);
    make("two", &[TRAINER, "spiffe://cluster/ns/rl/sa/ops"]);
    make("nameless", &[]);
    bench.sample(&bench.with("good")).await.unwrap();
    assert_eq!(
        bench.refused(&bench.with("stranger")).await,
        "CREDENTIALS_REFUSED"
    );
    assert_eq!(
        bench.refused(&bench.with("nameless")).await,
        "NO_CREDENTIALS"
    );
    assert_eq!(
        bench.refused(&bench.with("two")).await,
        "CREDENTIALS_REFUSED"
    );
    let told = bench.world.audit().into_iter().any(|line| {
        line["outcome"] == "CREDENTIALS_REFUSED"
            && line["detail"]
                .as_str()
                .unwrap()
                .contains("more than one URI")
    });
    assert!(told, "a certificate with two names is written down");

    // A token says who calls through whosever certificate; two names never pass.
    let with_token = |name: &str| Access {
        token_file: Some(bench.world.path("trainer-b")),
        ..bench.with(name)
    };
    bench.sample(&with_token("stranger")).await.unwrap();
    assert_eq!(
        bench.refused(&with_token("two")).await,
        "CREDENTIALS_REFUSED"
    );
    bench.world.stop().await;
}

#[tokio::test]
async fn who_is_not_trusted_does_not_get_as_far_as_a_call() {
    let bench = Bench::start(0, |tls| tls.require_client_cert = true).await;
    let dir = bench.world.dir.path();
    Authority::new().client(dir, "foreign", &[TRAINER], YEAR);
    bench
        .clients
        .client(dir, "late", &[TRAINER], Duration::ZERO);
    bench.clients.client(dir, "good", &[TRAINER], YEAR);
    let unreachable = async |access: &Access| {
        let status = bench.sample(access).await.unwrap_err();
        assert!(
            matches!(
                status.code(),
                Code::Unavailable | Code::Unknown | Code::Cancelled
            ),
            "{status:?}"
        );
    };
    unreachable(&bench.with("foreign")).await;
    unreachable(&bench.with("late")).await;
    unreachable(&token_of(dir, "trainer-a")).await;
    // Nor does a client speak to a server that it does not know.
    std::fs::write(dir.join("other-ca.pem"), Authority::new().pem).unwrap();
    unreachable(&Access {
        tls_ca: Some(dir.join("other-ca.pem")),
        ..bench.with("good")
    })
    .await;
    // Let in, it learns that no replica is there.
    let status = bench.sample(&bench.with("good")).await.unwrap_err();
    assert_eq!(reason(&status), "NO_REPLICA");
    bench.world.stop().await;
}

#[tokio::test]
async fn a_certificate_counts_until_its_end_on_an_old_connection_too() {
    let bench = Bench::start(1, |_| {}).await;
    let dir = bench.world.dir.path();
    bench
        .clients
        .client(dir, "brief", &[TRAINER], Duration::from_secs(4));
    let wire = bench.world.wire_with(&bench.with("brief"));
    let mut client = SamplingServiceClient::new(wire);
    client.sample(request(1, 2)).await.unwrap();
    eventually("it is refused", async || {
        let refused = client.sample(request(1, 2)).await;
        refused.is_err_and(|status| {
            assert_eq!(reason(&status), "CREDENTIALS_REFUSED");
            true
        })
    })
    .await;
    bench.world.stop().await;
}

#[tokio::test]
async fn certificates_are_exchanged_under_load_and_no_call_fails() {
    // Connections are made anew all the time: that fails no call either.
    let bench = Bench::start(1, |tls| tls.connection_age = Duration::from_millis(300)).await;
    let dir = bench.world.dir.path();
    bench.clients.client(dir, "old", &[TRAINER], YEAR);
    bench.clients.client(dir, "trainer", &[TRAINER], YEAR);
    let load = Load::start(&bench.world.wire_with(&bench.with("trainer")));
    load.each_goes_on().await;

    // The server's certificate, of the same authority.
    bench.servers.server(dir);
    let reloaded = |what: &str| {
        bench
            .world
            .audited(&[("event", "certificates-reloaded"), ("detail", what)])
    };
    eventually("it serves with it", async || {
        reloaded("the server's certificate")
    })
    .await;
    load.each_goes_on().await;

    // The clients' authority: first both are trusted, then clients change over,
    // then the old one is gone.
    let new = Authority::new();
    let both = format!("{}{}", bench.clients.pem, new.pem);
    replace(&dir.join("client-ca.pem"), &both);
    new.client(dir, "new", &[TRAINER], YEAR);
    eventually("the new one counts", async || {
        bench.sample(&bench.with("new")).await.is_ok()
    })
    .await;
    bench.sample(&bench.with("old")).await.unwrap();
    new.client(dir, "trainer", &[TRAINER], YEAR);
    load.each_goes_on().await;
    // One that was made before the change is over by now.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    load.each_goes_on().await;
    let wire = bench.world.wire_with(&bench.with("old"));
    let mut old = SamplingServiceClient::new(wire);
    replace(&dir.join("client-ca.pem"), &new.pem);
    eventually("the old one is refused", async || {
        let refused = old.sample(request(1, 2)).await;
        refused.is_err_and(|status| !unsent(&status))
    })
    .await;
    load.each_goes_on().await;
    load.stop().await;
    assert!(bench.sample(&bench.with("old")).await.is_err());
    bench.world.stop().await;
}

#[tokio::test]
async fn a_set_that_does_not_fit_together_changes_nothing() {
    let bench = Bench::start(1, |_| {}).await;
    let dir = bench.world.dir.path();
    let stray = KeyPair::generate().unwrap().serialize_pem();
    replace(&dir.join("server.key"), &stray);
    let refused = [("event", "certificates-reloaded"), ("outcome", "REFUSED")];
    eventually("it is refused", async || bench.world.audited(&refused)).await;
    let access = token_of(dir, "trainer-a");
    bench.sample(&access).await.unwrap();
    let audit = std::fs::read_to_string(bench.world.path("audit")).unwrap();
    let secret: String = stray.lines().nth(1).unwrap().chars().take(20).collect();
    assert!(!audit.contains(&secret));
    bench.world.stop().await;
}

#[tokio::test]
async fn who_shakes_no_hands_is_let_go() {
    let bench = Bench::start(0, |tls| tls.handshake_timeout = Duration::from_millis(200)).await;
    let address = bench.world.playground.server().grpc_address();
    let mut silent = TcpStream::connect(address).await.unwrap();
    let closed = tokio::time::timeout(Duration::from_secs(30), silent.read(&mut [0])).await;
    assert!(matches!(closed.unwrap(), Ok(0) | Err(_)));
    bench.world.stop().await;
}

/// What was told in a handshake that is over: until the server closes.
async fn closed(mut stream: TcpStream) {
    let mut rest = Vec::new();
    let read = stream.read_to_end(&mut rest);
    let _ = tokio::time::timeout(Duration::from_secs(30), read)
        .await
        .expect("the server closes");
}

#[tokio::test]
async fn handshakes_that_fail_are_counted_by_why() {
    let bench = Bench::start(0, |tls| {
        tls.require_client_cert = true;
        tls.handshake_timeout = Duration::from_secs(2);
    })
    .await;
    let dir = bench.world.dir.path();
    let address = bench.world.playground.server().grpc_address();
    let counted = async |reason: &str| {
        let page = bench.world.admin_page("ops", "/metrics").await;
        let series = format!("berth_tls_handshake_failures_total{{reason=\"{reason}\"}} ");
        let line = page.lines().find_map(|line| line.strip_prefix(&series));
        line.unwrap_or_else(|| panic!("{series} in {page}"))
            .parse::<u64>()
            .unwrap()
    };
    let becomes = async |reason: &str| {
        eventually(reason, async || counted(reason).await > 0).await;
    };
    let reasons = [
        "closed",
        "protocol",
        "timeout",
        "no_certificate",
        "certificate",
        "alert",
    ];
    for reason in reasons {
        assert_eq!(counted(reason).await, 0, "{reason}");
    }

    drop(TcpStream::connect(address).await.unwrap());
    becomes("closed").await;

    let mut plain = TcpStream::connect(address).await.unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    closed(plain).await;
    becomes("protocol").await;

    assert!(bench.sample(&token_of(dir, "trainer-a")).await.is_err());
    becomes("no_certificate").await;
    let audited = |outcome: &str| {
        bench.world.audited(&[
            ("event", "refused"),
            ("object", "TLS handshake"),
            ("outcome", outcome),
        ])
    };
    eventually("it is audited", async || audited("NO_CREDENTIALS")).await;

    Authority::new().client(dir, "foreign", &[TRAINER], YEAR);
    assert!(bench.sample(&bench.with("foreign")).await.is_err());
    becomes("certificate").await;
    eventually("it is audited", async || audited("CREDENTIALS_REFUSED")).await;

    std::fs::write(dir.join("other-ca.pem"), Authority::new().pem).unwrap();
    bench.clients.client(dir, "good", &[TRAINER], YEAR);
    let distrusts = Access {
        tls_ca: Some(dir.join("other-ca.pem")),
        ..bench.with("good")
    };
    assert!(bench.sample(&distrusts).await.is_err());
    becomes("alert").await;

    closed(TcpStream::connect(address).await.unwrap()).await;
    becomes("timeout").await;

    // One that is well is none of them.
    let before = futures_util::future::join_all(reasons.map(&counted)).await;
    let status = bench.sample(&bench.with("good")).await.unwrap_err();
    assert_eq!(reason(&status), "NO_REPLICA");
    let after = futures_util::future::join_all(reasons.map(&counted)).await;
    assert_eq!(before, after);
    bench.world.stop().await;
}

#[tokio::test]
async fn a_client_that_speaks_another_way_is_told_which() {
    let bench = Bench::start(0, |_| {}).await;
    let plain = World::start(0, |_| {}).await;
    let (dir, grpc) = (bench.world.dir.path(), bench.world.playground.server());
    let access = Access {
        tls_ca: Some(dir.join(SERVER_CA)),
        ..Access::default()
    };
    let told = async |url: String| {
        let wire = access.wire(&url, |endpoint| endpoint).unwrap();
        let asked = FleetServiceClient::new(wire)
            .get_stats(GetStatsRequest {})
            .await;
        cause(&asked.unwrap_err())
    };
    let (tls, server) = (grpc.grpc_address(), plain.playground.server());
    let (grpc, admin) = (server.grpc_address(), server.admin_address());
    for (url, say) in [
        (format!("http://{tls}"), "use https://"),
        (format!("https://{grpc}"), "use http://"),
        (format!("https://{admin}"), "use http://"),
        (format!("http://{admin}"), "7701"),
    ] {
        let told = told(url.clone()).await;
        assert!(told.contains(say), "{url}: {told}");
    }
    // Who speaks as the server does is told what the server says.
    assert!(told(format!("https://{tls}")).await.contains("Bearer"));
    assert!(told(format!("http://{grpc}")).await.contains("Bearer"));
    bench.world.stop().await;
    plain.stop().await;
}

#[tokio::test]
async fn a_key_that_everybody_may_change_is_not_served_with() {
    let (dir, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    authority.server(dir.path());
    std::fs::write(dir.path().join("client-ca.pem"), &authority.pem).unwrap();
    let start = async || {
        let mut config: Config = playground::config(None);
        config.auth.tls = Some(tls(dir.path()));
        Server::start(config).await
    };
    let key = dir.path().join("server.key");
    let mode = |mode| std::fs::set_permissions(&key, std::fs::Permissions::from_mode(mode));
    mode(0o666).unwrap();
    let fault = format!("{:#}", start().await.err().unwrap());
    assert!(
        fault.contains("server.key") && fault.contains("chmod"),
        "{fault}"
    );
    mode(0o600).unwrap();
    start().await.unwrap().stop().await.unwrap();
}
