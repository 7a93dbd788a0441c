//! A stranger's word, checked.

use super::*;

fn message() -> proto::RegisterReplicaRequest {
    proto::RegisterReplicaRequest {
        replica_id: "r-1.a:b_c".to_owned(),
        boot_id: "boot".to_owned(),
        address: Some(proto::register_replica_request::Address::Endpoint(
            "http://10.0.0.7:30000".to_owned(),
        )),
        engine: proto::EngineKind::Sglang.into(),
        model: "m".to_owned(),
        vocab_size: 1000,
        context_length: 100,
        page_size: 1,
        ranks: vec![proto::Rank {
            rank: 0,
            kv_capacity_tokens: 1,
            ..proto::Rank::default()
        }],
        ..proto::RegisterReplicaRequest::default()
    }
}

const RULES: Rules = Rules {
    allow_unknown_vocabulary: false,
};

fn caller() -> Option<SocketAddr> {
    Some(SocketAddr::from(([192, 0, 2, 1], 5000)))
}

fn faults(change: impl FnOnce(&mut proto::RegisterReplicaRequest)) -> Vec<String> {
    let mut message = message();
    change(&mut message);
    match facts(message, caller(), &RULES) {
        Ok(_) => Vec::new(),
        Err(error) => error
            .violations
            .iter()
            .map(|v| v.field.to_string())
            .collect(),
    }
}

#[test]
fn good_facts_are_taken_as_they_are() {
    let facts = facts(message(), caller(), &RULES).unwrap();
    assert_eq!(&*facts.url, "http://10.0.0.7:30000");
    assert_eq!(facts.ranks[0].url, facts.url);
    assert_eq!(facts.ranks[0].engine_rank, 0);
}

#[test]
fn a_port_means_the_callers_own_address() {
    let mut message = message();
    message.address = Some(proto::register_replica_request::Address::Port(30_000));
    let facts = facts(message, caller(), &RULES).unwrap();
    assert_eq!(&*facts.url, "http://192.0.2.1:30000");
    for bad in [0, 65_536] {
        assert_eq!(
            faults(|m| m.address = Some(proto::register_replica_request::Address::Port(bad))),
            ["port"]
        );
    }
}

#[test]
fn an_endpoint_is_host_and_port_and_nothing_else() {
    for bad in [
        "",
        "10.0.0.7:30000",
        "https://10.0.0.7",
        "http://u:p@10.0.0.7",
        "http://10.0.0.7/generate",
        "http://10.0.0.7?x=1",
        "http://10.0.0.7:30000/?",
        "http://10.0.0.7:30000?",
        "http://10.0.0.7:30000#x",
        "http://10.0.0.7:30000/#",
        "http://10.0.0.7:30000#",
        "http://10.0.0.7#:30000",
        "http://10.0.0.7:30000//",
        "http://10.0.0.7:30000/.",
        "http://u@10.0.0.7:30000",
        "http://@10.0.0.7:30000",
        " http://10.0.0.7:30000",
        "http://10.0.0.7:30000 ",
        "file:///etc/passwd",
        "http://",
        "http://10.0.0.7:99999",
        "http://[::1%25lo]:80",
        // Numbers to some who read them.
        "http://127.1:80",
        "http://2130706433:80",
        "http://0x7f000001:80",
        "http://0177.0.0.1:80",
        "http://127.0.0.1.:80",
        "http://engine.0x7f:80",
        "http://[10.0.0.7]:80",
        "http://10.0.0.7:+80",
        "http://10.0.0.7:0",
        "http://10.0.0.7:",
        // No name.
        "http://a..b:80",
        "http://a!b:80",
    ] {
        let with = faults(|m| {
            m.address = Some(proto::register_replica_request::Address::Endpoint(
                bad.to_owned(),
            ));
        });
        assert_eq!(with, ["endpoint"], "{bad}");
    }
}

#[test]
fn what_is_wrong_with_an_endpoint_is_said() {
    for dropped in [
        "u@10.0.0.7:1",
        "10.0.0.7:1/x",
        "10.0.0.7:1?x",
        "10.0.0.7:1#x",
    ] {
        let why = base_url(&format!("http://{dropped}")).unwrap_err();
        assert!(why.contains("user, path, query or fragment"), "{why}");
    }
    assert_eq!(
        base_url("HTTP://Engine:1/").as_deref(),
        Ok("http://Engine:1")
    );
}

#[test]
fn a_host_is_a_name_or_an_address_as_everybody_writes_it() {
    for good in [
        "http://10.0.0.7:30000",
        "http://[fd00::7]:30000",
        "http://[::ffff:10.0.0.7]:30000",
        "http://localhost:30000",
        "http://engine_7.pool-3.svc.cluster.local.:8000",
        "http://7.engines.test:8000",
        "http://0x7f.test:8000",
    ] {
        let address = proto::register_replica_request::Address::Endpoint(good.to_owned());
        assert!(faults(|m| m.address = Some(address)).is_empty(), "{good}");
    }
}

#[test]
fn what_is_shown_stays_on_its_line() {
    let two = || "a\nb".to_owned();
    let with = faults(|m| {
        m.labels = [("zone".to_owned(), two())].into();
        m.adapters = vec![proto::Adapter {
            name: "a".to_owned(),
            load_id: two(),
            resident: true,
        }];
        m.ranks[0].gpu_uuids = vec![two()];
    });
    assert_eq!(with, ["adapters", "labels", "ranks[0].gpu_uuids"]);
}

#[test]
fn all_faults_come_at_once() {
    let found = faults(|m| {
        *m = proto::RegisterReplicaRequest {
            ranks: vec![
                proto::Rank::default(),
                proto::Rank {
                    endpoint: Some("nonsense".to_owned()),
                    kv_capacity_tokens: 1,
                    ..proto::Rank::default()
                },
            ],
            ..proto::RegisterReplicaRequest::default()
        };
    });
    for field in [
        "replica_id",
        "boot_id",
        "endpoint",
        "engine",
        "model",
        "vocab_size",
        "context_length",
        "page_size",
        "ranks",
        "ranks[0].kv_capacity_tokens",
        "ranks[1].endpoint",
    ] {
        assert!(found.iter().any(|f| f == field), "{field} in {found:?}");
    }
}

#[test]
fn what_is_shown_stays_on_its_line_and_what_cannot_be_served_is_not_taken() {
    assert_eq!(faults(|m| m.model = "m\nforged".to_owned()), ["model"]);
    assert_eq!(
        faults(|m| m.weight_version = "\u{1b}[0m".to_owned()),
        ["weight_version"]
    );
    assert_eq!(
        faults(|m| m.engine = proto::EngineKind::Unspecified.into()),
        ["engine"]
    );
    assert!(faults(|m| m.engine = proto::EngineKind::Vllm.into()).is_empty());
    assert_eq!(faults(|m| m.page_size = 7), ["page_size"]);
    let twice = faults(|m| {
        m.ranks.push(proto::Rank {
            rank: 1,
            engine_rank: Some(0),
            kv_capacity_tokens: 1,
            ..proto::Rank::default()
        });
    });
    assert_eq!(twice, ["ranks"]);
}

#[test]
fn an_unknown_vocabulary_is_refused_unless_allowed() {
    assert_eq!(faults(|m| m.vocab_size = 0), ["vocab_size"]);
    let mut unknown = message();
    unknown.vocab_size = 0;
    let rules = Rules {
        allow_unknown_vocabulary: true,
    };
    assert_eq!(facts(unknown, caller(), &rules).unwrap().vocab_size, None);
}

#[test]
fn kinds_that_are_not_known_are_refused() {
    assert_eq!(faults(|m| m.engine = 99), ["engine"]);
    assert_eq!(faults(|m| m.logprob_mode = 99), ["logprob_mode"]);
    let untold = facts(message(), caller(), &RULES).unwrap();
    assert_eq!(untold.logprob_mode, LogprobMode::Unknown);
}
