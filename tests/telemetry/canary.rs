//! A string that no operator should see, planted wherever a caller can put one,
//! and looked for wherever an operator looks.

use std::time::Duration;

use berth::{
    auth::client::Access,
    engine::sim::{DropStream, Faults, Times, tokens},
    proto::{
        self, CancelSampleRequest, ExplainRouteRequest, FinishTrajectoryRequest, GetPinRequest,
        GetSampleRequest, Group, SampleRequest, Sampling, StopStrings, WeightsConstraint,
        fleet_service_client::FleetServiceClient, sample_request::Prompt,
    },
};
use tonic::{Code, Request, Status, metadata::MetadataMap};

use crate::{
    collector::Collector,
    front::Manner,
    plane::{Engine, Plane, eventually, stepping},
    requests::{reason, request},
    search::Needles,
    strangers,
};

pub const CANARY: &str = "CanaryXq7vB2";
/// A row of ids that no number of ours looks like.
const IDS: [u32; 4] = [70_707, 80_808, 90_909, 60_606];
const VOCAB: u32 = 151_936;

/// What every call of the canary brings in its headers.
fn with_headers<T>(message: T) -> Request<T> {
    with_headers_of(message, &format!("Bearer {}", strangers::TOKEN))
}

pub fn with_headers_of<T>(message: T, authorization: &str) -> Request<T> {
    let mut request = Request::new(message);
    let headers: &mut MetadataMap = request.metadata_mut();
    for (name, value) in [
        ("authorization", authorization.to_owned()),
        ("cookie", format!("session={CANARY}")),
        ("x-canary", CANARY.to_owned()),
        ("tracestate", format!("canary={CANARY}")),
        ("baggage", format!("canary={CANARY}")),
    ] {
        headers.insert(name, value.parse().unwrap());
    }
    let binary = tonic::metadata::MetadataValue::from_bytes(CANARY.as_bytes());
    headers.insert_bin("x-canary-bin", binary);
    request
}

/// A request with the canary in every name that it can have.
pub fn planted(n: u32) -> SampleRequest {
    let prompt: Vec<u32> = IDS.into_iter().chain([n, n + 1]).collect();
    SampleRequest {
        idempotency_key: Some(format!("{CANARY}-{n}")),
        cache_affinity_key: Some(format!("{CANARY} trajectory {n}")),
        adapter: Some(format!("{CANARY}-adapter")),
        group: Some(Group {
            key: format!("{CANARY} group"),
            share: false,
        }),
        ..request(&prompt, 6)
    }
}

fn text(n: u32) -> SampleRequest {
    SampleRequest {
        prompt: Some(Prompt::Text(format!("tell me of {CANARY}, {n}"))),
        sampling: Some(Sampling {
            max_tokens: Some(6),
            stop: Some(StopStrings {
                strings: vec![format!("{CANARY} stop")],
            }),
            ..Sampling::default()
        }),
        ..planted(n)
    }
}

/// One plane, its calls, and what they came to.
struct Story {
    plane: Plane,
    engines: Vec<Engine>,
    /// Calls of `Sample` and `SampleStream`.
    sampled: usize,
    errors: Vec<Status>,
}

impl Story {
    async fn start(options: &[&str], access: Access) -> Self {
        let mut plane = Plane::start(options, "trace").await;
        plane.access = access;
        let mut engines = Vec::new();
        for id in ["a", "b"] {
            let mut config = stepping(Duration::from_millis(2));
            let adapter = (format!("{CANARY}-adapter"), "/x".to_owned());
            config.adapters = Some(vec![adapter]);
            engines.push(plane.add(id, config).await);
        }
        Self {
            plane,
            engines,
            sampled: 0,
            errors: Vec::new(),
        }
    }

    fn all(&self, manner: Manner) {
        for engine in &self.engines {
            engine.front.set(manner);
        }
    }

    fn faults(&self, faults: &Faults) {
        for engine in &self.engines {
            engine.sim.set_faults(faults.clone());
        }
    }

    async fn ok(&mut self, message: SampleRequest) -> proto::SampleResponse {
        self.sampled += 1;
        let mut client = self.plane.client();
        let answer = client.sample(with_headers(message)).await;
        answer.expect("answered").into_inner()
    }

    async fn fails(&mut self, message: SampleRequest, code: Code, why: &str) {
        self.sampled += 1;
        let mut client = self.plane.client();
        let status = client.sample(with_headers(message)).await.unwrap_err();
        assert_eq!((status.code(), &*reason(&status)), (code, why), "{status}");
        self.errors.push(status);
    }

    async fn streams(&mut self, message: SampleRequest) {
        self.sampled += 1;
        let mut client = self.plane.client();
        let mut stream = match client.sample_stream(with_headers(message)).await {
            Ok(stream) => stream.into_inner(),
            Err(status) => return self.errors.push(status),
        };
        loop {
            match stream.message().await {
                Ok(Some(_)) => {}
                Ok(None) => return,
                Err(status) => return self.errors.push(status),
            }
        }
    }

    async fn tell(&mut self) {
        self.succeeds().await;
        self.is_refused().await;
        self.fails_at_engines().await;
        self.ends_early().await;
        self.asks_otherwise().await;
    }

    async fn succeeds(&mut self) {
        self.ok(planted(10)).await;
        assert!(self.ok(planted(10)).await.replayed);
        self.streams(planted(12)).await;
        self.streams(planted(12)).await;
        self.all(Manner::AnswersText);
        let said = self.ok(text(14)).await;
        assert!(format!("{said:?}").contains(CANARY), "the caller's own");
        self.streams(text(16)).await;
        self.all(Manner::Passes);
        // Joined.
        let slow = SampleRequest {
            sampling: Some(Sampling {
                max_tokens: Some(200),
                ignore_eos: true,
                ..Sampling::default()
            }),
            ..planted(18)
        };
        let mut client = self.plane.client();
        let first = {
            let slow = slow.clone();
            tokio::spawn(async move { client.sample(with_headers(slow)).await })
        };
        let mut client = self.plane.client();
        eventually("it runs", async || {
            let idempotency_key = format!("{CANARY}-18");
            let asked = GetSampleRequest {
                idempotency_key,
                ..GetSampleRequest::default()
            };
            client.get_sample(with_headers(asked)).await.is_ok()
        })
        .await;
        self.ok(slow).await;
        first.await.unwrap().unwrap();
        self.sampled += 1;
    }

    async fn is_refused(&mut self) {
        use Code::{AlreadyExists, FailedPrecondition, InvalidArgument, NotFound};
        let sampling = |change: fn(&mut Sampling)| {
            let mut asked = planted(20);
            let sampling = asked.sampling.as_mut().unwrap();
            change(sampling);
            asked
        };
        let exact = |version: &str| WeightsConstraint {
            constraint: Some(proto::weights_constraint::Constraint::Exact(
                version.to_owned(),
            )),
            wait: false,
        };
        let cases = [
            (
                SampleRequest {
                    // Of another request above.
                    idempotency_key: Some(format!("{CANARY}-10")),
                    ..planted(21)
                },
                AlreadyExists,
                "IDEMPOTENCY_KEY_REUSED",
            ),
            (
                SampleRequest {
                    idempotency_key: Some(format!("{CANARY} with a space")),
                    cache_affinity_key: Some(CANARY.repeat(40)),
                    model: Some(CANARY.repeat(40)),
                    adapter: Some(CANARY.repeat(40)),
                    weights: Some(exact(&CANARY.repeat(40))),
                    ..planted(22)
                },
                InvalidArgument,
                "INVALID_REQUEST",
            ),
            (
                sampling(|s| {
                    let schema = format!("{{\"{CANARY}\":");
                    s.structured = Some(proto::sampling::Structured::JsonSchema(schema));
                }),
                InvalidArgument,
                "INVALID_REQUEST",
            ),
            (
                SampleRequest {
                    model: Some(CANARY.to_owned()),
                    ..planted(23)
                },
                NotFound,
                "MODEL_NOT_FOUND",
            ),
            (
                SampleRequest {
                    adapter: Some(format!("{CANARY}-other")),
                    ..planted(24)
                },
                FailedPrecondition,
                "NOT_SUPPORTED",
            ),
            (
                SampleRequest {
                    weights: Some(exact(CANARY)),
                    ..planted(25)
                },
                FailedPrecondition,
                "WEIGHTS_NOT_SERVED",
            ),
            (
                request(&[IDS[0], IDS[1], IDS[2], IDS[3], VOCAB + 5], 4),
                InvalidArgument,
                "TOKEN_OUT_OF_VOCABULARY",
            ),
        ];
        for (asked, code, why) in cases {
            self.streams(asked.clone()).await;
            self.fails(asked, code, why).await;
        }
    }

    async fn fails_at_engines(&mut self) {
        use Code::{Internal, InvalidArgument, Unavailable};
        for (n, (manner, code, why)) in [
            (Manner::RefusesWithEcho, InvalidArgument, "ENGINE_REFUSED"),
            (Manner::FailsWithEcho, Unavailable, "REPLICA_LOST"),
            (Manner::StreamsEcho, Unavailable, "REPLICA_LOST"),
            (Manner::StreamsNonsense, Internal, "ENGINE_MISBEHAVED"),
        ]
        .into_iter()
        .enumerate()
        {
            self.all(manner);
            let n = 30 + 4 * n as u32;
            self.fails(planted(n), code, why).await;
            self.streams(planted(n + 1)).await;
            self.fails(text(n + 2), code, why).await;
            // As it is kept, where it is.
            let idempotency_key = format!("{CANARY}-{n}");
            let asked = GetSampleRequest {
                idempotency_key,
                ..GetSampleRequest::default()
            };
            let mut client = self.plane.client();
            match client.get_sample(with_headers(asked)).await {
                Ok(kept) => {
                    let kept = kept.into_inner();
                    assert!(!kept.failure_message.contains(CANARY), "{kept:?}");
                }
                Err(status) => self.errors.push(status),
            }
        }
        self.all(Manner::Passes);
        // Lost midway, and done elsewhere.
        self.faults(&Faults {
            drop_stream: Some(DropStream {
                times: Times::Next(1),
                after_tokens: 3,
            }),
            ..Faults::default()
        });
        self.ok(planted(50)).await;
        self.faults(&Faults::default());
    }

    async fn ends_early(&mut self) {
        let long = |n| {
            let mut asked = planted(n);
            asked.sampling.as_mut().unwrap().max_tokens = Some(5000);
            asked
        };
        // Out of time.
        let mut timed = with_headers(long(60));
        timed.set_timeout(Duration::from_millis(150));
        self.sampled += 1;
        let mut client = self.plane.client();
        let status = client.sample(timed).await.unwrap_err();
        // tonic's client keeps the deadline itself; whose word is first is chance.
        let late = [Code::DeadlineExceeded, Code::Cancelled];
        assert!(late.contains(&status.code()), "{status}");
        self.errors.push(status);
        // Cancelled by somebody else.
        self.sampled += 1;
        let waiting = {
            let asked = with_headers(long(62));
            let mut client = self.plane.client();
            tokio::spawn(async move { client.sample(asked).await })
        };
        eventually("it is cancelled", async || {
            let idempotency_key = format!("{CANARY}-62");
            let asked = CancelSampleRequest { idempotency_key };
            client.cancel_sample(with_headers(asked)).await.is_ok()
        })
        .await;
        self.errors.push(waiting.await.unwrap().unwrap_err());
        // Its caller goes away.
        self.sampled += 1;
        let asked = with_headers(SampleRequest {
            idempotency_key: None,
            ..long(64)
        });
        let mut stream = client.sample_stream(asked).await.unwrap().into_inner();
        stream.message().await.unwrap().unwrap();
        drop(stream);
    }

    async fn asks_otherwise(&mut self) {
        let mut client = self.plane.client();
        let unknown = || CANARY.repeat(2);
        let asked = GetSampleRequest {
            idempotency_key: unknown(),
            ..GetSampleRequest::default()
        };
        let not_found = client.get_sample(with_headers(asked)).await;
        self.errors.push(not_found.unwrap_err());
        let asked = CancelSampleRequest {
            idempotency_key: unknown(),
        };
        let not_found = client.cancel_sample(with_headers(asked)).await;
        self.errors.push(not_found.unwrap_err());
        let of = |model: &str| FinishTrajectoryRequest {
            model: Some(model.to_owned()),
            adapter: Some(format!("{CANARY}-adapter")),
            cache_affinity_key: format!("{CANARY} trajectory 10"),
        };
        let not_found = client.finish_trajectory(with_headers(of(CANARY))).await;
        self.errors.push(not_found.unwrap_err());
        let mut finished = of("");
        finished.model = None;
        let finished = client.finish_trajectory(with_headers(finished)).await;
        finished.unwrap();
        let asked = ExplainRouteRequest {
            request: Some(planted(70)),
        };
        client.explain_route(with_headers(asked)).await.unwrap();
        let asked = ExplainRouteRequest {
            request: Some(SampleRequest {
                model: Some(CANARY.to_owned()),
                ..planted(70)
            }),
        };
        let not_found = client.explain_route(with_headers(asked)).await;
        self.errors.push(not_found.unwrap_err());
        let mut fleet = FleetServiceClient::new(self.plane.channel.clone());
        let asked = GetPinRequest {
            model: None,
            adapter: Some(format!("{CANARY}-adapter")),
            cache_affinity_key: format!("{CANARY} trajectory 10"),
            tenant: None,
        };
        fleet.get_pin(with_headers(asked)).await.unwrap();
        let asked = proto::GetReplicaRequest {
            replica_id: CANARY.to_owned(),
        };
        let not_found = fleet.get_replica(with_headers(asked)).await;
        self.errors.push(not_found.unwrap_err());
        // A call that there is none of.
        let mut raw = tonic::client::Grpc::new(self.plane.channel.clone());
        raw.ready().await.unwrap();
        let path = format!("/berth.v1.SamplingService/{CANARY}");
        let codec = tonic_prost::ProstCodec::<GetPinRequest, ()>::default();
        let asked = with_headers(GetPinRequest::default());
        let unknown = raw.unary(asked, path.parse().unwrap(), codec).await;
        let status = unknown.map(|_| ()).unwrap_err();
        assert_eq!(status.code(), Code::Unimplemented, "{status}");
        self.errors.push(status);
    }
}

async fn nothing_of_it(form: &str, known: bool) {
    let collector = Collector::start().await;
    let dir = tempfile::tempdir().unwrap();
    let (access, more) = strangers::credentials(dir.path());
    let mut options = vec![
        "--log-format",
        form,
        "--otlp-endpoint",
        &collector.url,
        // Engines that fail on purpose stay in use.
        "--eject-after",
        "1000",
    ];
    let mut access = Some(access);
    if known {
        options.extend(more.iter().map(|option| &**option));
    } else {
        access = None;
    }
    let mut story = Story::start(&options, access.unwrap_or_default()).await;
    story.tell().await;
    if known {
        story
            .errors
            .extend(strangers::are_refused(&story.plane).await);
    }
    let needles = Needles::of_text(CANARY)
        .and_ids(&IDS[..2])
        .and_ids(&tokens::expected(&prompt(10), 0, 6, VOCAB)[..3]);

    for status in &story.errors {
        let details = String::from_utf8_lossy(status.details()).into_owned();
        let said = format!("{status:?} {} {details}", status.message());
        assert_eq!(needles.find(&said), None, "an error: {status}");
    }
    assert!(story.errors.len() > 20, "{}", story.errors.len());

    for accept in [None, Some("application/openmetrics-text")] {
        let (_, _, page) = story.plane.get("/metrics", accept).await;
        assert!(page.contains("ENGINE_REFUSED"), "{page}");
        assert_eq!(needles.find(&page), None, "a metric");
    }

    let (plane, sampled) = (story.plane, story.sampled);
    drop(story.engines);
    let log = plane.stop().await;
    assert_eq!(needles.find(&log), None, "the log");
    let finished = log.matches("request finished").count();
    assert_eq!(finished, sampled, "one line each: {log}");

    let received = collector.received();
    let spans = collector.spans();
    for name in ["affinity", "berth.v1.SamplingService/SampleStream"] {
        assert!(spans.iter().any(|span| span.name == name), "{name}");
    }
    assert_eq!(needles.find(&format!("{received:?}")), None, "a span");
    if known {
        assert_eq!(
            needles.find(&strangers::audited(dir.path())),
            None,
            "the audit log"
        );
    }
}

fn prompt(n: u32) -> Vec<u32> {
    IDS.into_iter().chain([n, n + 1]).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_of_a_caller_s_own_is_in_what_an_operator_sees_for_machines() {
    nothing_of_it("json", true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_of_a_caller_s_own_is_in_what_an_operator_sees_for_people() {
    nothing_of_it("human", false).await;
}
