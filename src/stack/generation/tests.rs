use super::*;

fn failed() -> Outcome {
    Err(Error::new(Reason::NoReplica, "none"))
}

#[tokio::test(start_paused = true)]
async fn all_followers_see_one_end_each_on_its_own_deadline() {
    let (generation, first) = Generation::begin(None, 1, 8);
    let second = generation.follow().unwrap();
    let third = generation
        .follow()
        .unwrap()
        .until(Instant::now() + Duration::from_secs(1));
    let late = generation.clone();
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_secs(2)).await;
        late.end(failed());
    });
    let (a, b, c) = tokio::join!(first.finished(), second.finished(), third.finished());
    assert_eq!(a.unwrap_err().reason, Reason::NoReplica);
    assert_eq!(b.unwrap_err().reason, Reason::NoReplica);
    assert_eq!(c.unwrap_err().reason, Reason::Deadline);
}

#[tokio::test(start_paused = true)]
async fn it_is_stopped_when_nobody_followed_it_for_the_grace() {
    let (generation, ticket) = Generation::begin(None, 1, 8);
    let watched = generation.clone();
    let start = Instant::now();
    let stopper = tokio::spawn(async move { watched.abandon_after(Duration::from_secs(30)).await });
    drop(ticket);
    tokio::time::sleep(Duration::from_secs(20)).await;
    let again = generation.follow().unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!generation.stop_token().is_cancelled(), "it is followed");
    drop(again);
    stopper.await.unwrap();
    assert!(generation.stop_token().is_cancelled());
    assert_eq!(start.elapsed(), Duration::from_secs(110));
    assert_eq!(generation.follow().unwrap_err(), CannotFollow::Stopping);
}

#[tokio::test(start_paused = true)]
async fn without_grace_it_is_stopped_at_once() {
    let (generation, ticket) = Generation::begin(None, 1, 8);
    let start = Instant::now();
    drop(ticket);
    generation.abandon_after(Duration::ZERO).await;
    assert!(generation.stop_token().is_cancelled());
    assert!(start.elapsed() <= Duration::from_millis(1));
}

#[tokio::test]
async fn followers_are_bounded() {
    let (generation, _first) = Generation::begin(None, 1, 2);
    let _second = generation.follow().unwrap();
    assert_eq!(generation.follow().unwrap_err(), CannotFollow::TooMany);
}
