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
        "file:///etc/passwd",
        "http://",
        "http://10.0.0.7:99999",
        "http://[::1%25lo]:80",
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
