"""The instrument behind `kvrt bench`: what is measured, its arithmetic, its pictures."""
