//! Callers of the canary who are known, who may not do what they ask for, and what is
//! written down of them.

use std::path::Path;

use berth::{
    auth::{client::Access, token::Token},
    proto::{
        self, DrainReplicaRequest, FinishTrajectoryRequest, GetSampleRequest,
        RegisterReplicaRequest, fleet_service_client::FleetServiceClient,
        replica_service_client::ReplicaServiceClient,
    },
};
use tonic::{Request, Status};

use crate::{
    canary::{CANARY, planted, with_headers_of},
    plane::Plane,
    requests::reason,
};

/// What every call shows; known where there are credentials.
pub const TOKEN: &str = "CanaryXq7vB2-5b9e1c07d3a8f264-everything";
/// One that may only register replicas.
const SIDECARS: &str = "CanaryXq7vB2-5b9e1c07d3a8f264-sidecars";
/// One that may only ask for samples.
const TRAINERS: &str = "CanaryXq7vB2-5b9e1c07d3a8f264-trainers";

/// A file of credentials in which every token has the canary in it.
pub fn credentials(dir: &Path) -> (Access, [String; 4]) {
    let lines = [
        ("all", "role=sample,replica,admin tenant=t", TOKEN),
        ("sidecars", "role=replica", SIDECARS),
        ("trainers", "role=sample tenant=u", TRAINERS),
    ];
    let lines = lines.map(|(principal, rest, token)| {
        let hash = Token::parse(token).unwrap().hash();
        format!("principal={principal} {rest} sha256={hash}\n")
    });
    let file = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    std::fs::write(file("credentials"), lines.concat()).unwrap();
    std::fs::write(file("token"), TOKEN).unwrap();
    let access = Access {
        token_file: Some(file("token").into()),
        ..Access::default()
    };
    let options = [
        "--credentials",
        &file("credentials"),
        "--audit-log",
        &file("audit"),
    ];
    (access, options.map(str::to_owned))
}

/// What the audit log says of the story, and of who was refused.
pub fn audited(dir: &Path) -> String {
    let audit = std::fs::read_to_string(dir.join("audit")).unwrap();
    for (event, outcome) in [
        ("register", "OK"),
        ("finish", "OK"),
        ("finish", "MODEL_NOT_FOUND"),
        ("register", "INVALID_REQUEST"),
        ("refused", "NO_CREDENTIALS"),
        ("refused", "CREDENTIALS_REFUSED"),
        ("refused", "ROLE_MISSING"),
    ] {
        let said = |line: &&str| {
            line.contains(&format!("\"event\":\"{event}\""))
                && line.contains(&format!("\"outcome\":\"{outcome}\""))
        };
        assert!(
            audit.lines().any(|line| said(&line)),
            "{event} {outcome}: {audit}"
        );
    }
    audit
}

/// Every way to be refused before anything is done, and what was said.
pub async fn are_refused(plane: &Plane) -> Vec<Status> {
    let mut said = Vec::new();
    let mut refused = |status: Status, why: &str| {
        assert_eq!(reason(&status), why, "{status}");
        said.push(status);
    };
    let mut client = plane.client();
    let get = || GetSampleRequest {
        idempotency_key: format!("{CANARY}-10"),
        ..GetSampleRequest::default()
    };
    let finish = || FinishTrajectoryRequest {
        cache_affinity_key: format!("{CANARY} trajectory 10"),
        adapter: Some(format!("{CANARY}-adapter")),
        model: Some(CANARY.to_owned()),
    };
    for authorization in [
        // Nobody's, too short, no scheme, another scheme, a blank in it.
        format!("Bearer {CANARY}-0123456789abcdef0123456789abcdef"),
        format!("Bearer {CANARY}"),
        CANARY.to_owned(),
        format!("Basic {CANARY}-0123456789abcdef0123456789abcdef"),
        format!("Bearer {CANARY} 0123456789abcdef0123456789abcdef"),
    ] {
        let status = client.get_sample(with_headers_of(get(), &authorization));
        refused(status.await.unwrap_err(), "CREDENTIALS_REFUSED");
        let status = client.finish_trajectory(with_headers_of(finish(), &authorization));
        refused(status.await.unwrap_err(), "CREDENTIALS_REFUSED");
    }
    let mut twice = with_headers_of(get(), &format!("Bearer {TRAINERS}"));
    let again = format!("Bearer {SIDECARS}").parse().unwrap();
    twice.metadata_mut().append("authorization", again);
    let status = client.get_sample(twice).await.unwrap_err();
    refused(status, "CREDENTIALS_REFUSED");
    let without = Request::new(finish());
    let status = client.finish_trajectory(without).await.unwrap_err();
    refused(status, "NO_CREDENTIALS");

    // Known, and not for this.
    let sidecars = format!("Bearer {SIDECARS}");
    let status = client.explain_route(with_headers_of(
        proto::ExplainRouteRequest {
            request: Some(planted(90)),
        },
        &sidecars,
    ));
    refused(status.await.unwrap_err(), "ROLE_MISSING");
    let trainers = format!("Bearer {TRAINERS}");
    let mut fleet = FleetServiceClient::new(plane.channel.clone());
    let drain = DrainReplicaRequest {
        replica_id: CANARY.to_owned(),
        ..DrainReplicaRequest::default()
    };
    let status = fleet.drain_replica(with_headers_of(drain, &trainers)).await;
    refused(status.unwrap_err(), "ROLE_MISSING");
    let mut replicas = ReplicaServiceClient::new(plane.channel.clone());
    let register = RegisterReplicaRequest {
        adapters: vec![proto::Adapter {
            name: format!("{CANARY}-adapter"),
            load_id: CANARY.to_owned(),
            resident: true,
        }],
        model: CANARY.to_owned(),
        labels: [(CANARY.to_owned(), CANARY.to_owned())].into(),
        ..RegisterReplicaRequest::default()
    };
    let status = replicas.register_replica(with_headers_of(register.clone(), &trainers));
    refused(status.await.unwrap_err(), "ROLE_MISSING");
    let status = replicas.register_replica(with_headers_of(register, &sidecars));
    refused(status.await.unwrap_err(), "INVALID_REQUEST");
    said
}
