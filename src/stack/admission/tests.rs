use std::sync::Mutex as StdMutex;

use tokio::task::JoinSet;

use super::*;

fn tenant(name: &str) -> Tenant {
    Tenant::new(name)
}

fn of(samples: u64) -> Cost {
    Cost { samples, bytes: 8 }
}

fn config(max_samples: u64) -> AdmissionConfig {
    AdmissionConfig {
        max_samples,
        tenant_samples: max_samples,
        tenant_bytes: 1 << 20,
        tenant_queue: 8,
    }
}

struct Bench {
    admission: Arc<Admission>,
    counters: Arc<Counters>,
    served: Arc<StdMutex<Vec<String>>>,
}

impl Bench {
    fn new(config: AdmissionConfig) -> Self {
        Self {
            admission: Admission::new(config),
            counters: Arc::default(),
            served: Arc::default(),
        }
    }

    async fn enter(&self, who: &str, cost: Cost, priority: i32) -> Result<Permit, Error> {
        let tenant = tenant(who);
        let entering = self
            .admission
            .enter(&tenant, cost, priority, None, &self.counters);
        entering.await
    }

    /// One that waits; named when it is let in, and then gone.
    async fn waits(&self, who: &str, cost: Cost, priority: i32, name: &str) {
        let (admission, counters) = (Arc::clone(&self.admission), Arc::clone(&self.counters));
        let (served, who, name) = (Arc::clone(&self.served), tenant(who), name.to_owned());
        let before = self.counters.waits_for_admission.get();
        tokio::spawn(async move {
            let permit = admission.enter(&who, cost, priority, None, &counters).await;
            served.lock().unwrap().push(name);
            drop(permit.unwrap());
        });
        while self.counters.waits_for_admission.get() == before {
            tokio::task::yield_now().await;
        }
    }

    async fn order(&self, count: usize) -> Vec<String> {
        while self.served.lock().unwrap().len() < count {
            tokio::task::yield_now().await;
        }
        self.served.lock().unwrap().clone()
    }
}

#[tokio::test(start_paused = true)]
async fn tenants_take_turns_whoever_offers_more() {
    let bench = Bench::new(config(1));
    let running = bench.enter("a", of(1), 0).await.unwrap();
    for n in 0..4 {
        bench.waits("a", of(1), 0, &format!("a{n}")).await;
    }
    bench.waits("b", of(1), 0, "b0").await;
    bench.waits("b", of(1), 0, "b1").await;
    drop(running);
    // The first was a's: b is next.
    assert_eq!(bench.order(6).await, ["b0", "a0", "b1", "a1", "a2", "a3"]);
}

#[tokio::test(start_paused = true)]
async fn samples_are_what_a_turn_costs() {
    let bench = Bench::new(config(4));
    let running = bench.enter("x", of(4), 0).await.unwrap();
    for n in 0..2 {
        bench.waits("a", of(4), 0, &format!("a{n}")).await;
    }
    for n in 0..6 {
        bench.waits("b", of(1), 0, &format!("b{n}")).await;
    }
    drop(running);
    let order = bench.order(8).await;
    let place = |name: &str| order.iter().position(|n| n == name).unwrap();
    assert_eq!(place("a0"), 0);
    assert!(place("a1") > place("b3"), "{order:?}");
}

#[tokio::test(start_paused = true)]
async fn priority_counts_within_a_tenant_and_not_beyond() {
    let bench = Bench::new(config(1));
    let running = bench.enter("x", of(1), 0).await.unwrap();
    bench.waits("a", of(1), 0, "a-first").await;
    bench.waits("a", of(1), -5, "a-low").await;
    bench.waits("a", of(1), 9, "a-high").await;
    bench.waits("a", of(1), 0, "a-second").await;
    bench.waits("b", of(1), -1000, "b").await;
    drop(running);
    let order = bench.order(5).await;
    let of_a: Vec<&String> = order.iter().filter(|n| n.starts_with('a')).collect();
    assert_eq!(of_a, ["a-high", "a-first", "a-second", "a-low"]);
    assert!(
        order.iter().position(|n| n == "b").unwrap() <= 1,
        "{order:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_tenant_at_its_limit_holds_up_nobody_else() {
    let bench = Bench::new(AdmissionConfig {
        tenant_samples: 2,
        ..config(100)
    });
    let held = bench.enter("a", of(2), 0).await.unwrap();
    bench.waits("a", of(1), 0, "a").await;
    let b = bench.enter("b", of(1), 0).await.unwrap();
    assert_eq!(bench.counters.waits_for_admission.get(), 1);
    drop((held, b));
    assert_eq!(bench.order(1).await, ["a"]);
    // Bytes are a limit of their own.
    let bytes = |bytes| Cost { samples: 1, bytes };
    let held = bench.enter("a", bytes(1 << 20), 0).await.unwrap();
    bench.waits("a", bytes(1), 0, "a again").await;
    drop(held);
    assert_eq!(bench.order(2).await, ["a", "a again"]);
}

#[tokio::test(start_paused = true)]
async fn what_needs_all_the_room_is_not_passed_for_ever() {
    let bench = Bench::new(config(4));
    let small = bench.enter("a", of(1), 0).await.unwrap();
    bench.waits("b", of(4), 0, "large").await;
    bench.waits("a", of(1), 0, "after").await;
    drop(small);
    assert_eq!(bench.order(2).await, ["large", "after"]);
}

#[tokio::test(start_paused = true)]
async fn more_than_a_limit_allows_is_refused_and_told_which() {
    let bench = Bench::new(AdmissionConfig {
        tenant_samples: 3,
        ..config(4)
    });
    let bytes = |bytes| Cost { samples: 1, bytes };
    for (cost, named) in [
        (of(4), &["--tenant-max-in-flight"][..]),
        (of(5), &["--max-in-flight", "--tenant-max-in-flight"]),
        (bytes((1 << 20) + 1), &["--tenant-max-bytes"]),
        (
            Cost {
                samples: 5,
                bytes: 2 << 20,
            },
            &[
                "--max-in-flight",
                "--tenant-max-in-flight",
                "--tenant-max-bytes",
            ],
        ),
    ] {
        // Neither with all the room there is, nor while it waits for weights.
        let entered = bench.enter("a", cost, 0).await.map(drop);
        let parked = bench
            .admission
            .park_as(&tenant("a"), cost, &bench.counters)
            .map(drop);
        for error in [entered.unwrap_err(), parked.unwrap_err()] {
            assert_eq!(error.reason, Reason::InvalidRequest);
            assert_eq!(error.retry_after, None);
            assert_eq!(error.violations.len(), named.len(), "{error}");
            for (violation, option) in error.violations.iter().zip(named) {
                assert!(violation.description.contains(option), "{error}");
            }
        }
    }
    assert_eq!(bench.counters.refused_by_admission.get(), 8);
    assert!(bench.admission.lock().is_empty());
    // What fills a limit to the brim is served.
    drop(bench.enter("a", of(3), 0).await.unwrap());
    drop(bench.enter("a", bytes(1 << 20), 0).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_refuses_at_once_and_says_when_to_come_back() {
    let bench = Bench::new(config(1));
    let held = bench.enter("a", of(1), 0).await.unwrap();
    for n in 0..8 {
        bench.waits("a", of(1), 0, &n.to_string()).await;
    }
    let refused = bench.enter("a", of(1), 1000).await.unwrap_err();
    assert_eq!(refused.reason, Reason::TenantBusy);
    assert!(refused.retry_after.is_some());
    // Another tenant's queue is its own.
    bench.waits("b", of(1), 0, "b").await;
    assert_eq!(bench.counters.refused_by_admission.get(), 1);
    drop(held);
    bench.order(9).await;
}

#[tokio::test(start_paused = true)]
async fn who_would_wait_beyond_its_deadline_is_refused_at_once() {
    let bench = Bench::new(config(1));
    // One call takes ten seconds here.
    let first = bench.enter("a", of(1), 0).await.unwrap();
    tokio::time::advance(Duration::from_secs(10)).await;
    drop(first);
    let held = bench.enter("a", of(1), 0).await.unwrap();
    bench.waits("a", of(1), 0, "waits").await;
    let within = async |seconds| {
        let deadline = Some(Instant::now() + Duration::from_secs(seconds));
        let (a, counters) = (tenant("a"), &bench.counters);
        let entering = bench.admission.enter(&a, of(1), 0, deadline, counters);
        tokio::time::timeout(Duration::from_millis(1), entering).await
    };
    let begun = Instant::now();
    let refused = within(5).await.unwrap().unwrap_err();
    assert_eq!(begun.elapsed(), Duration::ZERO);
    assert_eq!(refused.reason, Reason::TenantBusy);
    assert_eq!(refused.retry_after, Some(Duration::from_secs(20)));
    assert!(within(60).await.is_err(), "it waits");
    drop(held);
    bench.order(1).await;
}

#[tokio::test(start_paused = true)]
async fn who_leaves_the_queue_leaves_nothing() {
    let bench = Bench::new(config(1));
    let held = bench.enter("a", of(1), 0).await.unwrap();
    let gone = bench.enter("a", of(1), 0);
    assert!(
        tokio::time::timeout(Duration::from_secs(1), gone)
            .await
            .is_err()
    );
    // One that goes at the moment at which it is let in gives its place back.
    let a = tenant("a");
    let mut late = Box::pin(bench.admission.enter(&a, of(1), 0, None, &bench.counters));
    let once = futures_util::poll!(&mut late);
    assert!(once.is_pending());
    drop(held);
    drop(late);
    let next = bench.enter("b", of(1), 0).await.unwrap();
    assert_eq!(
        (bench.admission.of(&a), bench.admission.of(&tenant("b"))),
        (0, 1)
    );
    drop(next);
    assert_eq!(bench.admission.of(&tenant("b")), 0);
    assert!(bench.admission.lock().is_empty());
}

/// A place is held for half a second to one and a half.
fn service(n: u64) -> Duration {
    let spread = n.wrapping_mul(6_364_136_223_846_793_005) >> 54;
    Duration::from_millis(500 + spread * 1000 / 1024)
}

/// The 95th percentile of waiting and service of a tenant that offers 8 calls a
/// second, on 32 places, beside one that offers so many.
async fn p95_beside(others: u64, priority: i32) -> Duration {
    let admission = Admission::new(AdmissionConfig {
        tenant_queue: 512,
        ..config(32)
    });
    let counters = Arc::new(Counters::default());
    let start = Instant::now();
    let mut calls = JoinSet::new();
    for (who, rate, priority) in [("quiet", 8, 0), ("loud", others, priority)] {
        for n in 0..rate * 60 {
            let (admission, counters) = (Arc::clone(&admission), Arc::clone(&counters));
            calls.spawn(async move {
                let at = start + Duration::from_micros(n * 1_000_000 / rate);
                tokio::time::sleep_until(at).await;
                let who_is = tenant(who);
                let entering = admission.enter(&who_is, of(1), priority, None, &counters);
                let permit = entering.await.ok()?;
                tokio::time::sleep(service(n)).await;
                drop(permit);
                Some((who, at.elapsed()))
            });
        }
    }
    let all = calls.join_all().await;
    let mut quiet: Vec<Duration> = all
        .iter()
        .flatten()
        .filter(|(who, _)| *who == "quiet")
        .map(|(_, took)| *took)
        .collect();
    assert_eq!(quiet.len(), 480, "none of it is refused");
    if others > 0 {
        assert!(counters.refused_by_admission.get() > 0, "the other one is");
    }
    quiet.sort_unstable();
    quiet[quiet.len() * 95 / 100]
}

#[tokio::test(start_paused = true)]
async fn what_one_tenant_offers_is_not_another_ones_wait() {
    let alone = p95_beside(0, 0).await;
    assert!(alone > Duration::from_millis(1300), "{alone:?}");
    // Ten times its share of 16 a second; and all of it urgent.
    for priority in [0, 1000] {
        let beside = p95_beside(160, priority).await;
        assert!(
            beside.as_secs_f64() <= 1.3 * alone.as_secs_f64(),
            "{beside:?} {alone:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_weights_has_a_place_of_the_tenants_queue() {
    let bench = Bench::new(AdmissionConfig {
        tenant_queue: 3,
        ..config(1)
    });
    let park = |who: &str, cost: Cost| {
        let tenant = tenant(who);
        bench.admission.park_as(&tenant, cost, &bench.counters)
    };
    let mut parked: Vec<Parked> = (0..2).map(|_| park("a", of(1)).unwrap()).collect();
    assert_eq!(bench.admission.of(&tenant("a")), 2);
    // They are before nobody: neither their own tenant nor another one waits.
    let running = bench.enter("a", of(1), 0).await.unwrap();
    bench.waits("a", of(1), 0, "a0").await;
    let refused = park("a", of(1)).unwrap_err();
    assert_eq!(refused.reason, Reason::TenantBusy);
    assert!(refused.retry_after.is_some());
    let queued = bench.enter("a", of(1), 0).await.unwrap_err();
    assert_eq!(queued.reason, Reason::TenantBusy);
    assert_eq!(bench.counters.refused_by_admission.get(), 2);
    // Nor does it cost the other one anything.
    parked.push(park("b", of(1)).unwrap());
    drop(running);
    assert_eq!(bench.order(1).await, ["a0"]);
    parked.clear();
    assert!(bench.admission.lock().is_empty());

    // Their prompts are held, so bytes count as well.
    let large = |bytes| Cost { samples: 1, bytes };
    let one = park("a", large(1 << 20)).unwrap();
    assert_eq!(park("a", large(1)).unwrap_err().reason, Reason::TenantBusy);
    drop(one);
    let some = park("a", large(1 << 19)).unwrap();
    let more = park("a", large(1 << 19)).unwrap();
    assert_eq!(park("a", large(1)).unwrap_err().reason, Reason::TenantBusy);
    drop((some, more));
    assert!(bench.admission.lock().is_empty());
}
