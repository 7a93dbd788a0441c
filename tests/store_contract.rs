//! The contract of a store, as one suite that every implementation passes: the
//! functions in `suite` know only the trait. A new implementation adds a
//! `Backend` and one line at the end.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    clippy::cast_possible_truncation,
    reason = "a failed assumption is a failed test"
)]

#[path = "support/store.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with other tests")]
mod support;

use std::sync::Arc;

use berth::store::{
    Store,
    memory::{MemoryOptions, MemoryStore},
    sled::{SledOptions, SledStore},
};
use futures_util::future::BoxFuture;

/// Limits that the suite runs into.
const MAX_RESULT: u64 = 40_000;
const QUOTA: u64 = 150_000;

/// One implementation under test.
trait Backend: Send {
    /// The store.
    fn store(&self) -> Arc<dyn Store>;
    /// Every owner dies; the store is open again afterwards.
    fn crash(&mut self) -> BoxFuture<'_, ()>;
}

struct Memory(Arc<MemoryStore>);

impl Memory {
    fn start() -> Self {
        Self(Arc::new(MemoryStore::new(MemoryOptions {
            max_result_bytes: MAX_RESULT,
            tenant_quota: QUOTA,
            ..MemoryOptions::default()
        })))
    }
}

impl Backend for Memory {
    fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.0) as _
    }
    fn crash(&mut self) -> BoxFuture<'_, ()> {
        self.0.lose_owners();
        Box::pin(async {})
    }
}

struct Sled {
    dir: tempfile::TempDir,
    store: Arc<SledStore>,
}

impl Sled {
    fn options() -> SledOptions {
        SledOptions {
            max_result_bytes: MAX_RESULT,
            tenant_quota: QUOTA,
            free_space_floor: 0,
            ..SledOptions::default()
        }
    }

    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(SledStore::open(dir.path(), Self::options()).unwrap());
        Self { dir, store }
    }
}

impl Backend for Sled {
    fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.store) as _
    }
    fn crash(&mut self) -> BoxFuture<'_, ()> {
        // Owners are in memory alone, so closing loses them as a crash does.
        // Crashes at every step are in `store_crash.rs`.
        Box::pin(async {
            self.store.close().await.unwrap();
            self.store = Arc::new(SledStore::open(self.dir.path(), Self::options()).unwrap());
        })
    }
}

mod suite {
    use std::{
        collections::BTreeMap,
        num::NonZeroU32,
        sync::Arc,
        task::Poll,
        time::{Duration, SystemTime},
    };

    use berth::{
        call::LogprobMode,
        error::{Error, Reason},
        fleet::facts::{Accelerator, Capabilities, EngineKind, RankFacts, ReplicaFacts},
        ids::{BootId, IdempotencyKey, Incarnation, ReplicaId, Tenant},
        store::{
            AttemptRecord, Claim, ClaimRequest, Commit, KeyHash, OwnerId, Purged, Store,
            StoreError,
            life::Rejection,
            notes::{Note, PinNote, Recalled, ReplicaNote},
        },
    };

    use super::{Backend, MAX_RESULT, QUOTA, support::*};

    const OTHER: OwnerId = OwnerId(2);

    pub(super) async fn a_key_goes_from_claim_to_replay(backend: &mut dyn Backend) {
        let store = backend.store();
        assert!(store.read(key(1)).await.unwrap().is_none());
        let first = claimed(&*store, request(1, OWNER, 2)).await;
        assert_eq!(first.last_attempts, [0, 0]);
        assert!(first.finished.is_empty() && first.orphans.is_empty());
        for index in [1, 0] {
            store
                .dispatch(key(1), OWNER, index, attempt(1))
                .await
                .unwrap();
            let finished = sample(1, index, 1, 50);
            let commit = store.commit(key(1), OWNER, index, 1, finished).await;
            assert_eq!(commit, Ok(Commit::Stored));
        }
        let replay = done(&*store, request(1, OTHER, 2)).await;
        let expected = [sample(1, 0, 1, 50).output, sample(1, 1, 1, 50).output];
        assert_eq!(replay.samples, expected);
        let Some(Claim::Done(read)) = store.read(key(1)).await.unwrap() else {
            panic!("not readable");
        };
        assert_eq!(read, replay);
        backend.crash().await;
        let again = done(&*backend.store(), request(1, OWNER, 2)).await;
        assert_eq!(again, replay, "a replay is the same after a restart");
    }

    pub(super) async fn one_owner_at_a_time(backend: &mut dyn Backend) {
        let store = backend.store();
        claimed(&*store, request(1, OWNER, 1)).await;
        for asker in [OWNER, OTHER] {
            let claim = store.claim(request(1, asker, 1)).await.unwrap();
            assert!(matches!(claim, Claim::Running { owner } if owner == OWNER));
        }
        let refused = store.dispatch(key(1), OTHER, 0, attempt(1)).await;
        assert_eq!(refused, Err(StoreError::NotOwner));
        let refused = store.release(key(1), OTHER).await;
        assert_eq!(refused, Err(StoreError::NotOwner));
        let refused = store.dispatch(key(2), OWNER, 0, attempt(1)).await;
        assert_eq!(refused, Err(StoreError::NotOwner), "never claimed");
        store.release(key(1), OWNER).await.unwrap();
        claimed(&*store, request(1, OTHER, 1)).await;
    }

    pub(super) async fn a_hundred_claims_have_one_winner(backend: &mut dyn Backend) {
        let store = backend.store();
        let claims = (0..100).map(|n| {
            let store = Arc::clone(&store);
            tokio::spawn(async move { store.claim(request(1, OwnerId(n), 1)).await.unwrap() })
        });
        let mut won = 0;
        for claim in claims.collect::<Vec<_>>() {
            match claim.await.unwrap() {
                Claim::Claimed(_) => won += 1,
                Claim::Running { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(won, 1);
    }

    pub(super) async fn a_claim_that_nobody_awaits_is_given_back(backend: &mut dyn Backend) {
        let store = backend.store();
        for round in 0..100 {
            let mut claim = store.claim(request(1, OWNER, 1));
            for _ in 0..round % 4 {
                if let Poll::Ready(claim) = futures_util::poll!(&mut claim) {
                    assert!(matches!(claim, Ok(Claim::Claimed(_))), "{claim:?}");
                    store.release(key(1), OWNER).await.unwrap();
                    break;
                }
                tokio::task::yield_now().await;
            }
            drop(claim);
            let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
            while let Claim::Running { .. } = store.claim(request(1, OTHER, 1)).await.unwrap() {
                assert!(
                    tokio::time::Instant::now() < deadline,
                    "round {round}: kept for ever"
                );
                tokio::task::yield_now().await;
            }
            store.release(key(1), OTHER).await.unwrap();
        }
    }

    pub(super) async fn a_key_stands_for_one_request(backend: &mut dyn Backend) {
        let store = backend.store();
        claimed(&*store, request(1, OWNER, 2)).await;
        let mut other = request(1, OTHER, 2);
        other.fingerprint = fingerprint(9);
        let more = request(1, OTHER, 3);
        for wrong in [other.clone(), more] {
            assert!(matches!(store.claim(wrong).await, Ok(Claim::Mismatch)));
        }
        store.dispatch(key(1), OWNER, 0, attempt(1)).await.unwrap();
        backend.crash().await;
        let claim = backend.store().claim(other).await;
        assert!(matches!(claim, Ok(Claim::Mismatch)), "after a crash too");
    }

    pub(super) async fn tenants_do_not_meet(backend: &mut dyn Backend) {
        let store = backend.store();
        let name = IdempotencyKey::new("same");
        for tenant in ["a", "b"] {
            let tenant = Tenant::new(tenant);
            let mut request = request(1, OWNER, 1);
            request.key = KeyHash::of(&tenant, &name);
            request.tenant = tenant;
            claimed(&*store, request).await;
        }
    }

    fn of(tenant: &Tenant, n: u64) -> ClaimRequest {
        ClaimRequest {
            key: KeyHash::of(tenant, &IdempotencyKey::new(format!("key-{n}"))),
            tenant: tenant.clone(),
            ..request(n, OWNER, 1)
        }
    }

    /// Every step of a purge, as one.
    async fn purge(store: &dyn Store, tenant: &Tenant) -> Purged {
        let mut all = Purged::default();
        loop {
            let step = store.purge(tenant.clone(), all.next.take()).await.unwrap();
            all.keys += step.keys;
            all.bytes += step.bytes;
            all.owned += step.owned;
            all.pins.extend(step.pins);
            all.next = step.next;
            if all.next.is_none() {
                return all;
            }
        }
    }

    pub(super) async fn a_tenant_is_purged_alone(backend: &mut dyn Backend) {
        // More than one step looks at.
        const KEYS: u64 = 150;
        let store = backend.store();
        let tenants = [0, 1, 2, 3].map(|n| Tenant::new(format!("t{n}")));
        for (t, tenant) in tenants.iter().enumerate() {
            for n in 0..KEYS {
                let request = of(tenant, n);
                let key = request.key;
                claimed(&*store, request).await;
                let attempt = AttemptRecord {
                    binds: Some(t as u128 * 1000 + u128::from(n)),
                    ..attempt(1)
                };
                store.dispatch(key, OWNER, 0, attempt).await.unwrap();
                let finished = sample(n, 0, 1, 5);
                store.commit(key, OWNER, 0, 1, finished).await.unwrap();
            }
        }
        let [gone, kept, ..] = &tenants;
        let running = of(gone, KEYS);
        let running_key = running.key;
        claimed(&*store, running).await;
        store
            .dispatch(running_key, OWNER, 0, attempt(1))
            .await
            .unwrap();

        let mut purged = purge(&*store, gone).await;
        assert_eq!((purged.keys, purged.owned), (KEYS, 1));
        assert!(purged.bytes > KEYS * 100, "{}", purged.bytes);
        purged.pins.sort_unstable();
        let bound: Vec<u128> = (0..u128::from(KEYS)).collect();
        assert_eq!(purged.pins, bound);
        for n in 0..KEYS {
            assert!(store.read(of(gone, n).key).await.unwrap().is_none(), "{n}");
            let other = store.read(of(kept, n).key).await.unwrap();
            assert!(matches!(other, Some(Claim::Done(_))), "{n}");
        }
        // What somebody works on is whole, and goes once nobody does.
        let finished = sample(KEYS, 0, 1, 5);
        let committed = store.commit(running_key, OWNER, 0, 1, finished).await;
        assert_eq!(committed, Ok(Commit::Stored));
        let rest = purge(&*store, gone).await;
        assert_eq!((rest.keys, rest.owned), (1, 0));
        assert_eq!(purge(&*store, gone).await, Purged::default());

        backend.crash().await;
        let store = backend.store();
        assert!(store.read(of(gone, 7).key).await.unwrap().is_none());
        done(&*store, of(kept, 7)).await;
        // The key may be used anew, for anything.
        claimed(&*store, of(gone, 7)).await;
    }

    pub(super) async fn a_purge_makes_room_in_the_quota(backend: &mut dyn Backend) {
        let store = backend.store();
        let tenant = Tenant::new("full");
        let mut n = 0;
        let full = loop {
            let request = of(&tenant, n);
            let key = request.key;
            match store.claim(request).await {
                Ok(Claim::Claimed(_)) => {}
                Err(error) => break error,
                other => panic!("{other:?}"),
            }
            store.dispatch(key, OWNER, 0, attempt(1)).await.unwrap();
            let finished = sample(n, 0, 1, 3000);
            store.commit(key, OWNER, 0, 1, finished).await.unwrap();
            n += 1;
            assert!(n < 1000, "never full");
        };
        assert!(matches!(full, StoreError::Full(_)), "{full:?}");
        assert_eq!(purge(&*store, &tenant).await.keys, n);
        claimed(&*store, of(&tenant, n)).await;
    }

    pub(super) async fn attempts_follow_each_other(backend: &mut dyn Backend) {
        let store = backend.store();
        let refused = |rejection| Err(StoreError::Refused(rejection));
        claimed(&*store, request(1, OWNER, 1)).await;
        let send = |number| store.dispatch(key(1), OWNER, 0, attempt(number));
        let commit = |number| store.commit(key(1), OWNER, 0, number, sample(1, 0, number, 5));
        assert_eq!(
            commit(1).await,
            refused(Rejection::NeverDispatched).map(|()| Commit::Stored)
        );
        let fence = store.fence(key(1), OWNER, 0, 1).await;
        assert_eq!(fence, refused(Rejection::NeverDispatched));
        send(2).await.unwrap();
        assert_eq!(send(3).await, refused(Rejection::NotFenced));
        store.fence(key(1), OWNER, 0, 2).await.unwrap();
        store.fence(key(1), OWNER, 0, 2).await.unwrap();
        assert_eq!(send(2).await, refused(Rejection::NumberDoesNotGrow));
        assert_eq!(
            commit(2).await,
            Ok(Commit::Stale),
            "a fenced attempt is late"
        );
        send(3).await.unwrap();
        assert_eq!(commit(2).await, Ok(Commit::Stale));
        assert_eq!(commit(3).await, Ok(Commit::Stored));
        assert_eq!(commit(3).await, Ok(Commit::Stale), "a reply came twice");
        let no_sample = store.dispatch(key(1), OWNER, 7, attempt(9)).await;
        assert_eq!(no_sample, Err(StoreError::NotOwner), "the key is finished");
        let replay = done(&*store, request(1, OWNER, 1)).await;
        assert_eq!(replay.samples, [sample(1, 0, 3, 5).output]);
    }

    pub(super) async fn no_such_sample(backend: &mut dyn Backend) {
        let store = backend.store();
        claimed(&*store, request(1, OWNER, 2)).await;
        let refused = store.dispatch(key(1), OWNER, 2, attempt(1)).await;
        assert_eq!(refused, Err(StoreError::Refused(Rejection::NoSuchSample)));
        for count in [0, 5000] {
            let refused = store.claim(request(2, OWNER, count)).await;
            assert!(
                matches!(refused, Err(StoreError::Refused(Rejection::SampleCount))),
                "{count}"
            );
        }
    }

    pub(super) async fn a_crash_leaves_finished_samples_and_orphans(backend: &mut dyn Backend) {
        let store = backend.store();
        let first = claimed(&*store, request(1, OWNER, 4)).await;
        // 0 finished, 1 dispatched, 2 fenced, 3 only intended.
        let running = attempt(3);
        store.dispatch(key(1), OWNER, 0, attempt(1)).await.unwrap();
        store
            .dispatch(key(1), OWNER, 1, running.clone())
            .await
            .unwrap();
        store.dispatch(key(1), OWNER, 2, attempt(2)).await.unwrap();
        store.fence(key(1), OWNER, 2, 2).await.unwrap();
        let finished = sample(1, 0, 1, 30);
        store
            .commit(key(1), OWNER, 0, 1, finished.clone())
            .await
            .unwrap();
        backend.crash().await;
        let store = backend.store();
        let late = store.commit(key(1), OWNER, 1, 3, sample(1, 1, 3, 5)).await;
        assert_eq!(late, Err(StoreError::NotOwner), "the owner is dead");
        let Some(Claim::Claimed(read)) = store.read(key(1)).await.unwrap() else {
            panic!("not readable");
        };
        let taken = claimed(&*store, request(1, OTHER, 4)).await;
        for left in [read, taken] {
            assert_eq!(left.finished, [(0, finished.clone())]);
            assert_eq!(left.orphans, [(1, running.clone())]);
            assert_eq!(left.last_attempts, [1, 3, 2, 0]);
            let age = first.started_at.duration_since(left.started_at);
            assert!(age.unwrap_or_default() < Duration::from_millis(2));
        }
        let refused = store.dispatch(key(1), OTHER, 1, attempt(4)).await;
        assert_eq!(refused, Err(StoreError::Refused(Rejection::NotFenced)));
        store.fence(key(1), OTHER, 1, 3).await.unwrap();
        for (index, number) in [(1, 4), (2, 3), (3, 1)] {
            store
                .dispatch(key(1), OTHER, index, attempt(number))
                .await
                .unwrap();
            let finished = sample(1, index, number, 5);
            store
                .commit(key(1), OTHER, index, number, finished)
                .await
                .unwrap();
        }
        let replay = done(&*store, request(1, OWNER, 4)).await;
        assert_eq!(replay.samples[0], finished.output, "not generated again");
        assert_eq!(replay.samples[1], sample(1, 1, 4, 5).output);
    }

    pub(super) async fn intent_dies_with_its_owner(backend: &mut dyn Backend) {
        claimed(&*backend.store(), request(1, OWNER, 1)).await;
        backend.crash().await;
        let store = backend.store();
        assert!(store.read(key(1)).await.unwrap().is_none());
        claimed(&*store, request(1, OTHER, 1)).await;
        store.release(key(1), OTHER).await.unwrap();
        assert!(store.read(key(1)).await.unwrap().is_none());
    }

    pub(super) async fn a_release_keeps_what_there_is(backend: &mut dyn Backend) {
        let store = backend.store();
        claimed(&*store, request(1, OWNER, 2)).await;
        store.dispatch(key(1), OWNER, 0, attempt(1)).await.unwrap();
        store
            .commit(key(1), OWNER, 0, 1, sample(1, 0, 1, 5))
            .await
            .unwrap();
        store.dispatch(key(1), OWNER, 1, attempt(1)).await.unwrap();
        store.release(key(1), OWNER).await.unwrap();
        let late = store.commit(key(1), OWNER, 1, 1, sample(1, 1, 1, 5)).await;
        assert_eq!(late, Err(StoreError::NotOwner));
        let next = claimed(&*store, request(1, OTHER, 2)).await;
        assert_eq!(next.finished.len(), 1);
        assert_eq!(next.orphans.len(), 1);
        assert_eq!(next.last_attempts, [1, 1]);
    }

    pub(super) async fn a_failure_is_kept(backend: &mut dyn Backend) {
        let store = backend.store();
        let error = Error::new(Reason::EngineRefused, "the engine says no");
        claimed(&*store, request(1, OWNER, 2)).await;
        store.fail(key(1), OWNER, error.clone()).await.unwrap();
        backend.crash().await;
        let store = backend.store();
        match store.claim(request(1, OTHER, 2)).await.unwrap() {
            Claim::Failed(kept) => assert_eq!(kept, error),
            other => panic!("{other:?}"),
        }
        let late = store.fail(key(1), OWNER, error).await;
        assert_eq!(late, Err(StoreError::NotOwner));
    }

    pub(super) async fn a_large_result_is_kept_whole(backend: &mut dyn Backend) {
        let store = backend.store();
        let len = MAX_RESULT as usize / 10;
        assert_eq!(generate(&*store, 1, len).await, Commit::Stored);
        backend.crash().await;
        let replay = done(&*backend.store(), request(1, OWNER, 1)).await;
        assert!(is_result_of(&replay, 1, len));
    }

    pub(super) async fn a_result_too_large_is_not_kept(backend: &mut dyn Backend) {
        let store = backend.store();
        claimed(&*store, request(1, OWNER, 2)).await;
        store.dispatch(key(1), OWNER, 0, attempt(1)).await.unwrap();
        store.dispatch(key(1), OWNER, 1, attempt(1)).await.unwrap();
        let large = sample(1, 0, 1, MAX_RESULT as usize);
        let stale = store.commit(key(1), OWNER, 0, 1, large.clone());
        assert_eq!(stale.await, Ok(Commit::TooLarge));
        let again = store.commit(key(1), OWNER, 0, 1, large);
        assert_eq!(again.await, Ok(Commit::Stale), "the attempt is over");
        store
            .commit(key(1), OWNER, 1, 1, sample(1, 1, 1, 5))
            .await
            .unwrap();
        store.release(key(1), OWNER).await.unwrap();
        backend.crash().await;
        let next = claimed(&*backend.store(), request(1, OTHER, 2)).await;
        assert_eq!(next.finished.len(), 1, "the other sample is kept");
        assert!(next.orphans.is_empty());
        assert_eq!(next.last_attempts, [1, 1]);
    }

    pub(super) async fn a_full_tenant_gets_no_new_keys(backend: &mut dyn Backend) {
        let store = backend.store();
        let len = MAX_RESULT as usize / 10;
        let mut kept = 0;
        let full = loop {
            match store.claim(request(kept, OWNER, 1)).await {
                Ok(_) => {}
                Err(e) => break e,
            }
            store
                .dispatch(key(kept), OWNER, 0, attempt(1))
                .await
                .unwrap();
            let finished = sample(kept, 0, 1, len);
            let commit = store.commit(key(kept), OWNER, 0, 1, finished).await;
            assert_eq!(commit, Ok(Commit::Stored));
            kept += 1;
            assert!(kept < QUOTA / 1000, "no quota");
        };
        assert!(matches!(full, StoreError::Full(_)), "{full}");
        assert!(kept > 1);
        for n in 0..kept {
            let replay = done(&*store, request(n, OWNER, 1)).await;
            assert!(is_result_of(&replay, n, len), "{n} was evicted");
        }
        let mut other = request(9999, OWNER, 1);
        other.tenant = Tenant::new("other");
        claimed(&*store, other).await;
        backend.crash().await;
        let still = backend.store().claim(request(kept, OWNER, 1)).await;
        assert!(matches!(still, Err(StoreError::Full(_))), "after a restart");
    }

    pub(super) async fn incarnations_only_grow(backend: &mut dyn Backend) {
        let boot = |n: u32| BootId::new(format!("boot-{n}"));
        let replica = |name: &str| ReplicaId::new(name);
        for start in 1u64..=5 {
            let store = backend.store();
            for repeated in [false, true] {
                let boot = boot(start as u32);
                let grant = store.incarnation(replica("a"), boot).await.unwrap();
                assert_eq!(grant.incarnation.0, start);
                assert_eq!(grant.new, !repeated);
            }
            if start % 2 == 0 {
                backend.crash().await;
            }
        }
        let store = backend.store();
        let other = store.incarnation(replica("b"), boot(1)).await.unwrap();
        assert_eq!((other.incarnation.0, other.new), (1, true));
        let earlier = store.incarnation(replica("a"), boot(3)).await.unwrap();
        assert_eq!((earlier.incarnation.0, earlier.new), (3, false));
        for start in 6..100 {
            let grant = store.incarnation(replica("a"), boot(start)).await.unwrap();
            assert_eq!(grant.incarnation.0, u64::from(start));
        }
    }

    pub(super) async fn boots_at_once_get_different_numbers(backend: &mut dyn Backend) {
        let store = backend.store();
        let grants = (0..40).map(|n| {
            let store = Arc::clone(&store);
            tokio::spawn(async move {
                let boot = BootId::new(format!("boot-{}", n / 2));
                store.incarnation(ReplicaId::new("a"), boot).await.unwrap()
            })
        });
        let mut numbers = Vec::new();
        for grant in grants.collect::<Vec<_>>() {
            numbers.push(grant.await.unwrap().incarnation.0);
        }
        numbers.sort_unstable();
        // Of 20 boots each twice; a store may forget old ones but never repeat.
        let distinct: std::collections::BTreeSet<u64> = numbers.iter().copied().collect();
        assert!(distinct.len() >= 20, "{numbers:?}");
        assert_eq!(numbers.first(), Some(&1));
    }

    pub(super) async fn many_generations_at_once(backend: &mut dyn Backend) {
        let store = backend.store();
        let work = (0..120u64).map(|n| {
            let store = Arc::clone(&store);
            tokio::spawn(async move { generate(&*store, n, 20).await })
        });
        for work in work.collect::<Vec<_>>() {
            assert_eq!(work.await.unwrap(), Commit::Stored);
        }
        backend.crash().await;
        let store = backend.store();
        for n in 0..120 {
            let replay = done(&*store, request(n, OWNER, 1)).await;
            assert!(is_result_of(&replay, n, 20), "{n}");
        }
    }

    fn replica(id: &str, ranks: u32) -> ReplicaNote {
        let url: Arc<str> = "http://127.0.0.1:1".into();
        let facts = ReplicaFacts {
            id: ReplicaId::new(id),
            boot: BootId::new("boot"),
            url: Arc::clone(&url),
            engine: EngineKind::Sglang,
            engine_version: String::new(),
            model: "m".into(),
            vocab_size: NonZeroU32::new(9),
            context_length: 100,
            weight_version: "1".into(),
            adapters: Vec::new(),
            capabilities: Capabilities::default(),
            accelerator: Accelerator::default(),
            ranks: (0..ranks)
                .map(|rank| RankFacts {
                    rank,
                    url: Arc::clone(&url),
                    engine_rank: rank,
                    gpu_uuids: (0..8).map(|n| format!("GPU-{n}-{rank:0100}")).collect(),
                    kv_capacity: 1000,
                    max_running: 4,
                })
                .collect(),
            page_size: 1,
            logprob_mode: LogprobMode::default(),
            labels: BTreeMap::new(),
            engine_start: None,
        };
        ReplicaNote {
            facts,
            incarnation: Incarnation(4),
            drain: None,
            owner: (ranks > 1).then(|| "sidecars".into()),
            has_beaten: ranks > 2,
        }
    }

    fn pin(n: u32) -> PinNote {
        PinNote {
            target: target(),
            tokens: n,
            adapter: 3,
            used_at: SystemTime::UNIX_EPOCH + Duration::from_secs(u64::from(n)),
        }
    }

    async fn recalled(backend: &dyn Backend) -> Recalled {
        let mut all = backend.store().recall().await.unwrap();
        all.replicas.sort_by(|a, b| a.facts.id.cmp(&b.facts.id));
        all
    }

    pub(super) async fn notes_are_kept_replaced_and_removed(backend: &mut dyn Backend) {
        let store = backend.store();
        let replica_of =
            |id: &str, ranks| Note::Replica(ReplicaId::new(id), Some(Box::new(replica(id, ranks))));
        let until = SystemTime::UNIX_EPOCH + Duration::from_secs(77);
        // One of them fills many values of a store that keeps small ones.
        let notes = vec![
            Note::Pin(1, Some(pin(1))),
            Note::Pin(u128::MAX, Some(pin(2))),
            Note::Pin(3, Some(pin(3))),
            replica_of("small", 1),
            // As large as a registration may be.
            replica_of("large", 1024),
            replica_of("gone", 200),
            Note::Condemned([5; 16], Some(until)),
            Note::Condemned([6; 16], Some(until)),
        ];
        store.note(notes).await.unwrap();
        backend.crash().await;
        let all = recalled(backend).await;
        assert_eq!(all.pins, [(1, pin(1)), (3, pin(3)), (u128::MAX, pin(2))]);
        let expected = ["gone", "large", "small"].map(|id| match id {
            "gone" => replica(id, 200),
            "large" => replica(id, 1024),
            _ => replica(id, 1),
        });
        assert_eq!(all.replicas, expected);
        assert_eq!(all.condemned, [([5; 16], until), ([6; 16], until)]);
        let store = backend.store();
        let notes = vec![
            Note::Pin(3, None),
            Note::Pin(99, None),
            Note::Pin(1, Some(pin(10))),
            Note::Pin(1, Some(pin(11))),
            replica_of("large", 2),
            Note::Replica(ReplicaId::new("gone"), None),
            Note::Condemned([6; 16], None),
        ];
        store.note(notes).await.unwrap();
        for _ in 0..2 {
            let all = recalled(backend).await;
            assert_eq!(all.pins, [(1, pin(11)), (u128::MAX, pin(2))]);
            assert_eq!(all.replicas, [replica("large", 2), replica("small", 1)]);
            assert_eq!(all.condemned, [([5; 16], until)]);
            backend.crash().await;
        }
    }

    /// More than any store reads at once.
    pub(super) async fn ten_thousand_pins_come_back(backend: &mut dyn Backend) {
        let store = backend.store();
        for piece in 0..10 {
            let notes = (0..1000)
                .map(|n| piece * 1000 + n)
                .map(|n| Note::Pin(u128::from(n) << 64, Some(pin(n))));
            store.note(notes.collect()).await.unwrap();
        }
        backend.crash().await;
        let all = recalled(backend).await;
        assert_eq!(all.pins.len(), 10_000);
        for ((key, note), n) in all.pins.iter().zip(0u32..) {
            assert_eq!((*key, note), (u128::from(n) << 64, &pin(n)));
        }
    }

    pub(super) async fn an_attempt_notes_the_pin_that_it_binds(backend: &mut dyn Backend) {
        let store = backend.store();
        claimed(&*store, request(1, OWNER, 1)).await;
        store.dispatch(key(1), OWNER, 0, attempt(1)).await.unwrap();
        backend.crash().await;
        let all = recalled(backend).await;
        let [(7, note)] = &all.pins[..] else {
            panic!("{all:?}");
        };
        assert_eq!((&note.target, note.tokens), (&target(), 0));
    }

    pub(super) async fn the_epoch_stays(backend: &mut dyn Backend) {
        let before = backend.store().epoch();
        assert_ne!(before, 0);
        backend.crash().await;
        assert_eq!(backend.store().epoch(), before, "nothing was lost");
    }
}

macro_rules! contract {
    ($backend:ident, $module:ident: $($test:ident)*) => {
        mod $module {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $test() {
                    super::suite::$test(&mut super::$backend::start()).await;
                }
            )*
        }
    };
}

macro_rules! contracts {
    ($($backend:ident as $module:ident),*) => {$(
        contract! { $backend, $module:
            a_key_goes_from_claim_to_replay
            one_owner_at_a_time
            a_hundred_claims_have_one_winner
            a_claim_that_nobody_awaits_is_given_back
            a_key_stands_for_one_request
            tenants_do_not_meet
            a_tenant_is_purged_alone
            a_purge_makes_room_in_the_quota
            attempts_follow_each_other
            no_such_sample
            a_crash_leaves_finished_samples_and_orphans
            intent_dies_with_its_owner
            a_release_keeps_what_there_is
            a_failure_is_kept
            a_large_result_is_kept_whole
            a_result_too_large_is_not_kept
            a_full_tenant_gets_no_new_keys
            incarnations_only_grow
            boots_at_once_get_different_numbers
            many_generations_at_once
            notes_are_kept_replaced_and_removed
            ten_thousand_pins_come_back
            an_attempt_notes_the_pin_that_it_binds
            the_epoch_stays
        }
    )*};
}

contracts! { Memory as memory, Sled as sled }
