use super::*;
use crate::ids::{Incarnation, ReplicaId};

fn prompt(i: u8) -> PromptHash {
    PromptHash([i; 16])
}

fn start(replica: &str) -> Target {
    Target {
        replica: ReplicaId::new(replica),
        incarnation: Incarnation(1),
        rank: 0,
    }
}

#[tokio::test(start_paused = true)]
async fn a_second_death_condemns_for_a_time() {
    let poison = Poison::default();
    assert!(poison.turn(&prompt(1)).await.is_none());
    poison.died(&prompt(1), &start("a"), 1, false);
    assert!(poison.admit(&prompt(1)).is_ok());
    assert!(poison.turn(&prompt(1)).await.is_some());
    poison.died(&prompt(1), &start("b"), 50, true);
    let refused = poison.admit(&prompt(1)).unwrap_err();
    assert_eq!(refused.reason, Reason::PromptCondemned);
    assert!(poison.admit(&prompt(2)).is_ok());
    tokio::time::advance(CONDEMNED_FOR).await;
    assert!(poison.admit(&prompt(1)).is_ok());
}

#[tokio::test(start_paused = true)]
async fn the_death_of_a_start_is_news_once() {
    let mut known = Known::default();
    let mut sibling = start("a");
    sibling.rank = 1;
    let mut next = start("a");
    next.incarnation = Incarnation(2);
    assert!(known.is_news(&start("a")));
    tokio::time::advance(TOGETHER * 2).await;
    assert!(!known.is_news(&start("a")) && !known.is_news(&sibling));
    assert!(known.is_news(&next) && known.is_news(&start("b")));
    for i in 0..MANY_DEATHS + 10 {
        known.is_news(&start(&format!("r{i}")));
    }
    assert!(known.logged.len() <= MANY_DEATHS);
}

#[tokio::test(start_paused = true)]
async fn who_comes_to_a_dead_engine_did_not_kill_it() {
    let poison = Poison::default();
    poison.said_dead(&prompt(1), &start("a"), 2, false);
    poison.said_dead(&prompt(2), &start("a"), 2, false);
    assert!(poison.turn(&prompt(1)).await.is_some(), "was there");
    assert!(poison.turn(&prompt(2)).await.is_some(), "was there");
    tokio::time::advance(TOLD).await;
    poison.said_dead(&prompt(3), &start("a"), 1, false);
    assert!(poison.turn(&prompt(3)).await.is_none(), "came too late");
    // Another start of it is another engine.
    let mut next = start("a");
    next.incarnation = Incarnation(2);
    tokio::time::advance(TOGETHER).await;
    poison.said_dead(&prompt(3), &next, 1, false);
    assert!(poison.turn(&prompt(3)).await.is_some());
    for i in 0..MANY_DEATHS + 10 {
        poison.said_dead(&prompt(9), &start(&format!("r{i}")), 1, false);
    }
    assert!(poison.lock().dead.len() <= MANY_DEATHS);
}

#[tokio::test(start_paused = true)]
async fn suspects_go_one_at_a_time_and_others_freely() {
    let poison = Poison::default();
    poison.died(&prompt(1), &start("a"), 2, false);
    poison.died(&prompt(2), &start("a"), 1, false);
    let first = poison.turn(&prompt(1)).await;
    assert!(
        tokio::time::timeout(Duration::from_secs(60), poison.turn(&prompt(2)))
            .await
            .is_err()
    );
    assert!(poison.turn(&prompt(3)).await.is_none());
    drop(first);
    assert!(poison.turn(&prompt(2)).await.is_some());
}

#[tokio::test(start_paused = true)]
async fn an_answer_clears_and_time_does_too() {
    let poison = Poison::default();
    poison.died(&prompt(1), &start("a"), 1, false);
    poison.cleared(&prompt(1));
    assert!(poison.turn(&prompt(1)).await.is_none());
    tokio::time::advance(TOGETHER).await;
    poison.died(&prompt(1), &start("b"), 1, false);
    tokio::time::advance(SUSPECT_FOR).await;
    poison.died(&prompt(1), &start("c"), 1, true);
    assert!(poison.admit(&prompt(1)).is_ok(), "the first was long ago");
}

#[tokio::test(start_paused = true)]
async fn a_crowd_is_retried_freely_once_and_the_culprit_found_in_its_turn() {
    let poison = Poison::default();
    for i in 0..20 {
        poison.died(&prompt(i), &start("a"), 20, false);
    }
    for i in 0..20 {
        assert!(poison.turn(&prompt(i)).await.is_none(), "all at once");
    }
    tokio::time::advance(Duration::from_secs(1)).await;
    for i in 0..3 {
        poison.died(&prompt(i), &start("b"), 30, false);
    }
    for i in 0..20 {
        assert!(poison.admit(&prompt(i)).is_ok(), "condemns nobody");
        assert_eq!(poison.turn(&prompt(i)).await.is_some(), i < 3);
    }
    poison.died(&prompt(1), &start("c"), 30, true);
    for i in 0..20 {
        assert_eq!(poison.admit(&prompt(i)).is_err(), i == 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_correlated_crash_condemns_nobody() {
    let poison = Poison::default();
    poison.died(&prompt(0), &start("z"), 1, false);
    tokio::time::advance(TOGETHER).await;
    // A rack goes while the suspect has its turn on one replica of it.
    for (i, replica) in (1..).zip(["a", "b", "c"]) {
        poison.died(&prompt(i), &start(replica), 1, false);
    }
    poison.died(&prompt(0), &start("d"), 1, true);
    for i in 0..4 {
        assert!(poison.admit(&prompt(i)).is_ok());
    }
}

#[tokio::test(start_paused = true)]
async fn memory_is_bounded() {
    let poison = Poison::default();
    for i in 0..MOST + 10 {
        let mut hash = [0; 16];
        hash[..8].copy_from_slice(&(i as u64).to_le_bytes());
        poison.died(&PromptHash(hash), &start("a"), 1, false);
    }
    assert!(poison.lock().prompts.len() <= MOST);
}
