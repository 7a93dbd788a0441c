//! Every transition, under paused time.

use super::*;

const C: HealthConfig = HealthConfig {
    eject_after: 3,
    hang_after: Duration::from_secs(15),
    slowest_prefill: 2000,
    slowest_decode: 5,
    first_term: Duration::from_secs(5),
    longest_term: Duration::from_secs(60),
    probes_to_return: 2,
    forgiven_after: Duration::from_secs(600),
    fence_after: Duration::from_secs(5),
};
const TTL: Duration = Duration::from_secs(12);

fn secs(s: f64) -> Duration {
    Duration::from_secs_f64(s)
}

fn term(health: &RankHealth, now: Instant) -> Option<Duration> {
    match health.standing() {
        Standing::Ejected { until, .. } => Some(until - now),
        Standing::Trusted | Standing::OnTrial { .. } => None,
    }
}

/// Ejects it and brings it back; returns the term and the time afterwards.
fn round(health: &mut RankHealth, now: Instant) -> (Duration, Instant) {
    assert!(health.eject(Cause::Hangs, now, &C));
    let term = term(health, now).unwrap();
    let then = now + term;
    health.tick(then, TTL);
    for last in [false, true] {
        assert!(health.ask());
        assert_eq!(health.probed(Probe::Passed, then, &C), last);
    }
    (term, then)
}

#[tokio::test(start_paused = true)]
async fn failures_in_a_row_eject_and_a_success_resets_the_streak() {
    let t = Instant::now();
    let mut health = RankHealth::new(t);
    assert!(!health.failed(Some(1), t, &C));
    assert!(!health.failed(Some(2), t + secs(1.0), &C));
    health.succeeded();
    assert!(!health.failed(Some(3), t + secs(2.0), &C));
    assert!(!health.failed(Some(4), t + secs(3.0), &C));
    assert_eq!(health.fitness(), Fitness::Fit);
    assert!(health.failed(Some(5), t + secs(4.0), &C));
}

#[tokio::test(start_paused = true)]
async fn a_burst_of_broken_connections_is_one_failure() {
    let t = Instant::now();
    let mut health = RankHealth::new(t);
    for i in 0..1000 {
        assert!(!health.failed(Some(i), t + secs(0.0001) * u32::try_from(i).unwrap(), &C));
    }
}

#[tokio::test(start_paused = true)]
async fn one_request_that_fails_for_ever_ejects_nobody() {
    let t = Instant::now();
    let mut health = RankHealth::new(t);
    for i in 0..100 {
        assert!(!health.failed(Some(7), t + secs(1.0) * i, &C));
    }
    assert!(health.failed(Some(8), t + secs(100.0), &C));
    // Silence at an abort is nobody's request.
    let mut health = RankHealth::new(t);
    let ejects = |health: &mut RankHealth, i: u32| health.failed(None, t + secs(1.0) * i, &C);
    assert!(!ejects(&mut health, 0) && !ejects(&mut health, 1) && ejects(&mut health, 2));
}

#[tokio::test(start_paused = true)]
async fn a_streak_of_long_ago_is_over() {
    let t = Instant::now();
    let mut health = RankHealth::new(t);
    for i in 0..10 {
        assert!(!health.failed(Some(i.into()), t + secs(700.0) * i, &C));
    }
}

#[tokio::test(start_paused = true)]
async fn an_ejected_rank_is_tried_after_its_term_and_returns_after_two_probes() {
    let t = Instant::now();
    let mut health = RankHealth::new(t);
    assert!(health.eject(Cause::Failures, t, &C));
    assert_eq!(health.fitness(), Fitness::Out(Cause::Failures.text()));
    assert!(!health.eject(Cause::Hangs, t, &C), "it is out already");
    assert_eq!(health.fitness(), Fitness::Out(Cause::Hangs.text()));
    assert!(!health.ask(), "not before its term is over");
    health.tick(t + secs(4.9), TTL);
    assert!(!health.ask());
    let t = t + secs(5.0);
    health.tick(t, TTL);
    assert!(health.ask());
    assert!(!health.ask(), "one probe at a time");
    assert!(!health.probed(Probe::Passed, t, &C));
    assert!(health.ask());
    assert!(!health.probed(Probe::Busy, t, &C), "says nothing");
    assert!(health.ask());
    assert!(matches!(health.fitness(), Fitness::Out(_)));
    assert!(health.probed(Probe::Passed, t, &C));
    assert_eq!(health.standing(), Standing::Trusted);
}

#[tokio::test(start_paused = true)]
async fn a_failed_probe_ejects_for_longer_and_the_hang_counts_from_its_beginning() {
    let t = Instant::now();
    let mut health = RankHealth::new(t);
    health.eject(Cause::Hangs, t, &C);
    let then = t + secs(5.0);
    health.tick(then, TTL);
    assert!(health.ask());
    health.probed(Probe::Failed, then, &C);
    assert_eq!(
        health.standing(),
        Standing::Ejected {
            why: Cause::Hangs,
            since: t,
            until: then + secs(10.0)
        }
    );
    // A probe that was slow to end changes nothing any more.
    assert!(!health.probed(Probe::Passed, then, &C));
}

#[tokio::test(start_paused = true)]
async fn terms_grow_for_flapping_up_to_a_bound_and_are_forgiven_after_long_trust() {
    let mut now = Instant::now();
    let mut health = RankHealth::new(now);
    let mut terms = Vec::new();
    for _ in 0..6 {
        let (term, then) = round(&mut health, now);
        terms.push(term.as_secs());
        now = then;
    }
    assert_eq!(terms, [5, 10, 20, 40, 60, 60]);
    let (term, _) = round(&mut health, now + secs(600.0));
    assert_eq!(term, secs(5.0), "forgiven");
    let (term, _) = round(&mut RankHealth::new(now), now);
    assert_eq!(term, secs(5.0), "a new incarnation starts clean");
}

#[tokio::test(start_paused = true)]
async fn the_sidecars_bad_word_closes_at_once_and_two_good_ones_open() {
    let t = Instant::now();
    let mut health = RankHealth::new(t);
    assert!(!health.heard(true, t, &C));
    assert!(health.heard(false, t, &C));
    let Fitness::Closed(why) = health.fitness() else {
        panic!("{:?}", health.fitness());
    };
    // Who says so, and what bounds it.
    for word in ["sidecar", "--frozen-after"] {
        assert!(why.contains(word), "{why}");
    }
    assert!(!health.may_be_probed());
    health.heard(true, t, &C);
    health.heard(false, t, &C);
    health.heard(true, t, &C);
    assert!(matches!(health.fitness(), Fitness::Closed(_)), "in a row");
    assert!(health.heard(true, t, &C));
    assert_eq!(health.fitness(), Fitness::Fit);
}

#[tokio::test(start_paused = true)]
async fn an_illness_that_lasts_moves_the_keys() {
    let t = Instant::now();
    let mut health = RankHealth::new(t);
    health.heard(false, t, &C);
    assert!(!health.tick(t + secs(11.9), TTL));
    assert!(health.tick(t + TTL, TTL));
    let Fitness::Out(why) = health.fitness() else {
        panic!("{:?}", health.fitness());
    };
    for word in ["sidecar", "--frozen-after", "--heartbeat-interval"] {
        assert!(why.contains(word), "{why}");
    }
    health.heard(true, t + TTL, &C);
    assert!(health.heard(true, t + TTL, &C));
    assert_eq!(health.fitness(), Fitness::Fit);
}

#[test]
fn long_prompts_and_wide_frames_are_waited_for() {
    assert_eq!(C.patience(0, 0), secs(15.0));
    assert_eq!(C.patience(128_000, 0), secs(79.0));
    assert_eq!(C.patience(0, 2048), secs(15.0 + 409.6));
    let careless = HealthConfig {
        slowest_prefill: 0,
        ..C
    };
    assert!(careless.patience(u32::MAX, u32::MAX) > secs(15.0));
}
